-- What operators need: to list jobs without a walk over the backlog, and to put dead ones back.

alter table fairlane.jobs add column replays integer not null default 0;
comment on column fairlane.jobs.replays is 'How often it was put back after it had ended. `attempt` counts from the last time on.';

-- Neither column ever changes, so that a job's updates stay HOT. Ids rise, so that the index is filled at its end.
create index jobs_in_queue on fairlane.jobs (queue_id, id);

-- Listed newest first; and a job that leaves its end is taken out of the entry that names it. `is_dead` stands here as
-- a number, so that no statement of upkeep, which walks by id, takes this index for its own.
create index finished_by_end on fairlane.finished ((is_dead::integer), at, id);
