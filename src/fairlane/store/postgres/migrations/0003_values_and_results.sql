-- A small key-value store. Keys are ordered by their bytes, whatever the database's collation says.
create table fairlane.stored_values (
    key text collate "C" primary key check (octet_length(key) between 1 and 512),
    value bytea not null
);

create function fairlane.write_values(keys text[], "values" bytea[]) returns void
language plpgsql volatile
as $$
declare
    each record;
begin
    -- One after the other, by key: of two writers the one that comes second waits at the first key that both write, so
    -- that neither can hold what the other wants next. A statement for all would lock in an order of its own.
    for each in
        select u.key, u.value
        from unnest(keys, "values") as u (key, value)
        order by u.key collate "C"
    loop
        if each.value is null then
            delete from fairlane.stored_values s where s.key = each.key;
        else
            insert into fairlane.stored_values (key, value)
            values (each.key, each.value)
            -- (Not `excluded.value`: that asks for the right to read values, which operators do not have.)
            on conflict (key) do update set value = each.value;
        end if;
    end loop;
end
$$;
comment on function fairlane.write_values is 'Put these values under these keys; null deletes. Two of them never deadlock.';


-- Processes that wait for jobs to end. Each listens on a channel of its own, in a session that holds the advisory lock
-- `ear` for as long as it lives. After a crash of the server none of those sessions is left, and no row need be.
--
-- Whoever ends jobs looks here first: few rows that seldom change. Those that come and go with every wait are only ever
-- looked up by their job, so that dead ones cost nothing while a snapshot keeps them.
create unlogged table fairlane.result_listeners (
    waiter uuid primary key,
    ear bigint not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

create unlogged table fairlane.result_waiters (
    job uuid not null,
    waiter uuid not null,
    primary key (job, waiter)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

create function fairlane.announce(jobs uuid[]) returns bigint
language plpgsql volatile
as $$
declare
    told bigint;
begin
    select count(pg_notify(fairlane.channel(w.waiter), w.job::text))
    into told
    from fairlane.result_waiters w
    where w.job = any (jobs)
      -- Whoever can share an ear's lock would speak to the dead.
      and (
        select not pg_try_advisory_xact_lock_shared(l.ear)
        from fairlane.result_listeners l
        where l.waiter = w.waiter
      );
    return told;
end
$$;
comment on function fairlane.announce is 'Tell those who wait for these jobs that they have ended. Returns how many were told.';
