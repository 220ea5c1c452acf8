-- Who has taken a unique key. Whether it is still held, the state of that job says: nothing is written when a job starts or
-- ends. `job` is null while a key is being taken for the first time; one that stays so is free.
create table fairlane.uniques (
    id bytea primary key,
    job uuid,
    digest bytea,
    until smallint not null default 1 check (until between 0 and 2),
    expires_at bigint
) with (fillfactor = 80);
comment on column fairlane.uniques.expires_at is 'Until 2 (a window): when the key is free again, whatever became of its job.';
create index uniques_of_job on fairlane.uniques (job);
create index uniques_by_end on fairlane.uniques (expires_at) where expires_at is not null;

-- Which key each job has asked for: one that is replayed asks for it again, whoever has taken it since.
create table fairlane.unique_jobs (
    job uuid primary key,
    key bytea not null,
    until smallint not null check (until between 0 and 2)
);
