-- Workers that have schedules, to be told when an operator resumes or triggers one.
create table schedule_holders (
    worker blob primary key,
    kept_at integer not null
) strict, without rowid;
