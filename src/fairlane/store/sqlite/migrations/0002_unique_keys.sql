-- Who has taken a unique key. Whether it is still held, the state of that job says: nothing is written when a job starts or
-- ends.
create table uniques (
    id blob primary key,
    job blob not null,
    digest blob not null,
    until integer not null,
    expires_at integer
) strict, without rowid;
create index uniques_of_job on uniques (job);
create index uniques_by_end on uniques (expires_at) where expires_at is not null;

-- Which key each job has asked for: one that is replayed asks for it again, whoever has taken it since.
create table unique_jobs (
    job blob primary key,
    key blob not null,
    until integer not null
) strict, without rowid;
