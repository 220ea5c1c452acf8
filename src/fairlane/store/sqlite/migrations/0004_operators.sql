-- What operators need: to list jobs without a walk over the backlog, and to put dead ones back.

-- How often it was put back after it had ended. `attempt` counts from the last time on.
alter table jobs add column replays integer not null default 0;

create index jobs_by_queue on jobs (queue, id);
