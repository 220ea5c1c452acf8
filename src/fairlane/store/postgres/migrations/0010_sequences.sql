-- Jobs that run one after the other. One that will be tried again keeps its place until it is ready: bells say how many
-- ended claims keep theirs, and how many places are given back.
alter table fairlane.jobs add column keeps_place boolean not null default false;
comment on column fairlane.jobs.keeps_place is 'Set while the job is scheduled for another attempt, and only then: in a sequence nothing may start before it.';
alter table fairlane.releases add column kept integer[];
comment on column fairlane.releases.kept is 'Of the claims that ended, how many have not ended their job. Null: none.';
alter table fairlane.arrivals add column resumed integer;
comment on column fairlane.arrivals.resumed is 'How many jobs had kept their place until now. Null: none.';

-- Who keeps a place, for whoever counts them anew. The flag changes only together with `due_at`, which is indexed as well:
-- from ready to running to done a job's updates stay HOT.
create index jobs_keeping_place on fairlane.jobs (queue_id, lane) where keeps_place;
