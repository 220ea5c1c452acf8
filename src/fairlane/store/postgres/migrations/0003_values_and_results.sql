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
            on conflict (key) do update set value = excluded.value;
        end if;
    end loop;
end
$$;
comment on function fairlane.write_values is 'Put these values under these keys; null deletes. Two of them never deadlock.';


-- Who waits for which job to end. Each listens on a channel of its own, in a session that holds the advisory lock `ear`
-- for as long as it lives. After a crash of the server none of those sessions is left, and no row need be.
create unlogged table fairlane.result_waiters (
    job uuid not null,
    waiter uuid not null,
    ear bigint not null,
    primary key (job, waiter)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
