-- A small key-value store. Text is compared by its bytes.
create table stored_values (
    key text primary key check (length(cast(key as blob)) between 1 and 512),
    value blob not null
) strict;

-- Who waits for which job to end: the address of a mailbox, to be nudged by whoever ends the job.
create table result_waiters (
    job blob not null,
    waiter blob not null,
    primary key (job, waiter)
) strict, without rowid;
