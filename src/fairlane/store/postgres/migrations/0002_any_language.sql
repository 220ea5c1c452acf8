-- Producers in any language: `fairlane.enqueue`, `fairlane.cancel` and `fairlane.job_status`. They stamp jobs as Python's
-- producers do, by the policy in force: the same keys, the same hashes, the same refusals in the same words. What both
-- must agree on is written down in `tests/transactions/vectors.json`, which both are tested against.

-- The first 16 bytes of SHA-256 over a form that every language can build; see `policy/keys.py`.
create function fairlane.identity(domain text, parts text[]) returns bytea
language sql immutable parallel safe
as $$
    select substring(sha256(convert_to(domain || E'\n', 'UTF8') || coalesce(string_agg(
        case when p.part is null then convert_to('~', 'UTF8')
            else convert_to(octet_length(convert_to(p.part, 'UTF8')) || ':' || p.part || ',', 'UTF8') end,
        ''::bytea order by p.place), ''::bytea)) from 1 for 16)
    from unnest(parts) with ordinality as p (part, place)
$$;
comment on function fairlane.identity is 'The identity of a lane, a gate, a unique key: a hash in a domain of its own.';

create function fairlane.lane_id(queue text, priority integer, keys jsonb) returns bytea
language sql immutable parallel safe
as $$
    select fairlane.identity('fairlane/lane/1', array[queue, priority::text] || array(
        select p.part
        from jsonb_each_text(keys) as k (name, value)
        cross join lateral (values (1, k.name), (2, k.value)) as p (place, part)
        order by k.name collate "C", p.place
    ))
$$;

-- Lamping and Veach's jump consistent hash of the first 8 bytes of an identity; see `policy/partitions.py`.
create function fairlane.partition_of("values" text[], width integer) returns integer
language plpgsql immutable parallel safe
as $$
declare
    number numeric := 0;
    digest bytea := fairlane.identity('fairlane/partition/1', "values");
    chosen bigint := 0;
    jump bigint := 0;
begin
    for place in 0 .. 7 loop
        number := number * 256 + get_byte(digest, place);
    end loop;
    while jump < width loop
        chosen := jump;
        number := mod(number * 2862933555777941757 + 1, 18446744073709551616);
        jump := trunc((chosen + 1) * (2147483648.0::float8 / (div(number, 8589934592) + 1)::float8));
    end loop;
    return chosen;
end $$;

create function fairlane.refuse(code text, words text, variadic arguments text[] default '{}') returns void
language plpgsql
as $$ begin raise exception using errcode = code, message = format(words, variadic arguments); end $$;
comment on function fairlane.refuse is 'Raises an error of class FL. The codes: docs/how-to/enqueue-from-any-language.md.';

create function fairlane.canonical_key(name text, value json, whose text default '') returns text
language plpgsql immutable parallel safe
as $$
declare
    said text := btrim(value::text);
    size integer;
begin
    case json_typeof(value)
        when 'null' then
            return null;
        when 'boolean' then
            perform fairlane.refuse('FL002', '%skey ''%s'': %s is a bool; give a str or an int, such as ''%s''',
                whose, name, initcap(said), said);
        when 'number' then
            if said !~ '^-?[0-9]+$' then
                perform fairlane.refuse('FL002',
                    '%skey ''%s'': %s is a float, which has no one canonical form; give a str or an int',
                    whose, name, said);
            end if;
            said := said::numeric::text;
        when 'string' then
            said := value #>> '{}';
        else
            perform fairlane.refuse('FL002',
                '%skey ''%s'': a %s cannot be a key; give a str, an int, a UUID or None',
                whose, name, case json_typeof(value) when 'array' then 'list' else 'dict' end);
    end case;
    size := octet_length(convert_to(said, 'UTF8'));
    if size > 512 then
        perform fairlane.refuse('FL002', '%skey ''%s'': %s bytes is more than 512; hash the value, or use a shorter one',
            whose, name, size::text);
    end if;
    return said;
end $$;
comment on function fairlane.canonical_key is 'The one form of a key''s value: 42 and "42" are the same key.';

-- A number as `%g` writes it, which names the window of a rate.
create function fairlane.short_number(number double precision) returns text
language sql immutable parallel safe
as $$
    select case
        when number = 0 then '0'
        when r.power between -4 and 5 then trim_scale(r.value)::text
        else trim_scale(round(r.value / (10::numeric ^ r.power), 5))::text || 'e'
            || case when r.power < 0 then '-' else '+' end || lpad(abs(r.power)::text, 2, '0')
    end
    from (
        -- Rounded first: 999999.5 has one more digit then.
        select g.value, floor(log(nullif(g.value, 0)))::integer as power
        from (
            select round(number::numeric, 5 - coalesce(floor(log(nullif(number::numeric, 0)))::integer, 0)) as value
        ) g
    ) r
$$;

-- The limits of a policy that a producer has to know of, with the names that their state goes by.
create function fairlane.limits_of(policy jsonb)
returns table (name text, document jsonb, is_brought boolean)
language sql immutable parallel safe
as $$
    select
        case when row_number() over same = 1 then l.identity else l.identity || '#' || row_number() over same end,
        l.document,
        l.document -> 'max' = '{"from": "job"}' or l.document -> 'limit' = '{"from": "job"}'
    from (
        select u.place, u.document,
            case u.document ->> 'kind'
                when 'rate' then 'rate/' || fairlane.short_number((u.document ->> 'per')::float8 / 1000000) || 's'
                when 'rolling_rate' then 'rolling/' || fairlane.short_number((u.document ->> 'per')::float8 / 1000000) || 's'
                else u.document ->> 'kind'
            end || ':' || array_to_string(array(select jsonb_array_elements_text(u.document -> 'by')), ',') as identity
        from jsonb_array_elements(policy -> 'limits') with ordinality as u (document, place)
        where not u.document ? 'name'
    ) l
    window same as (partition by l.identity order by l.place)
$$;

-- A fresh id (UUID version 7): 48 bits of milliseconds, then chance.
create function fairlane.new_job_id(now bigint) returns uuid
language sql volatile parallel safe
as $$
    select (lpad(to_hex(now / 1000), 12, '0') || '7' || substring(chance from 14 for 3) || substring(chance from 17))::uuid
    from (select replace(gen_random_uuid()::text, '-', '') as chance) c
$$;

-- What producers send as the statement `enqueue_one`, word for word: a test holds the two together.
create function fairlane.store_job(bigint, boolean, uuid, integer, text, smallint, bytea, jsonb, jsonb, bytea, integer,
    bigint, bigint, bytea, text, text)
returns bigint
language sql volatile
as $$
    with
    clock as materialized (
        select fairlane.instant($1::bigint) as now, fairlane.ahead($1) as ahead, nextval('fairlane.positions') as position
    ),
    stored as (
        insert into fairlane.jobs (id, queue_id, task, priority, lane, lane_keys, keys, payload, max_attempts, position,
            enqueued_at, ready_at, state, due_at, on_dead, given, given_by, context)
        select $3::uuid, $4::integer, $5::text, $6::smallint, $7::bytea, $8::jsonb, $9::jsonb, $10::bytea, $11::integer,
            position, now, now,
            case when coalesce($13::bigint + ahead, now + $12::bigint) > now then 0 else 1 end,
            case when coalesce($13 + ahead, now + $12) > now then coalesce($13 + ahead, now + $12) end,
            $14::bytea, $15::text, case when $15 is not null then position end, $16::text
        from clock
        returning position, ready_at, state, given_by
    ),
    rung as (
        -- One that is due later rings for its numbers alone: they hold from now on.
        insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, given, given_by)
        select $4, $7, $6, fairlane.keys_of_lane($8, $9, $5), state, position, ready_at, $15, given_by
        from stored
        where state = 1 or given_by is not null
    )
    select case
        when $2::boolean and (
            current_setting('transaction_isolation') <> 'read committed' or fairlane.nudge($4, 1) = 0
        ) then length(pg_notify('fairlane', $4::text)::text)
        when $2 then 0
        when exists (select from fairlane.waiters w where w.queue_id = $4) then fairlane.nudge($4, 1)
        else 0
    end
    from stored
$$;

-- The statement `cancel`, likewise.
create function fairlane.cancel_job(uuid, bigint, boolean, text)
returns table (was smallint, state integer, told text, announced bigint, woken bigint)
language sql volatile
as $$
    with
    job as materialized (
        select j.*, fairlane.instant($2::bigint) as now
        from fairlane.jobs j
        where j.id = $1::uuid
        for update
    ),
    ended as (
        update fairlane.jobs j
        set state = 5, outcome = 'cancelled', cancel_requested = true, finished_at = job.now, due_at = null,
            claimed_at = null, worker = null, error = $4::text, keeps_place = false
        from job
        where j.id = any (array[job.id]) and job.state < 2
        returning j.id
    ),
    rung as (
        insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, resumed)
        select queue_id, lane, priority, fairlane.keys_of_lane(lane_keys, keys, task), -state, position, ready_at,
            keeps_place::integer
        from job
        where state = 1 or (state = 0 and keeps_place)
    ),
    filed as (
        insert into fairlane.finished (is_dead, at, jobs)
        select false, now, array[id]
        from job
        where state < 2
    ),
    asked as (
        update fairlane.jobs j
        set cancel_requested = true
        from job
        where j.id = any (array[job.id]) and job.state = 2 and not $3::boolean
        returning j.id
    ),
    noted as (
        insert into fairlane.cancellations (lease, job)
        select lease, id
        from job
        where state = 2 and not $3
        on conflict do nothing
    )
    select
        job.state as was,
        case when job.state < 2 then 5 else job.state end as state,
        (select pg_notify(fairlane.channel(l.worker_id), 'cancel')
         from fairlane.leases l
         where l.id = job.lease and job.state = 2 and not $3)::text as told,
        case when job.state < 2 then fairlane.announce(array[job.id]) end as announced,
        -- Whoever has waited behind it in a sequence can start now.
        case when job.state = 0 and job.keeps_place
            and exists (select from fairlane.waiters w where w.queue_id = job.queue_id)
            then fairlane.nudge(job.queue_id, 1) end as woken
    from job
$$;

-- The keys that a job must carry: those that its queue declares, else all that its policy looks at.
create function fairlane.needed_keys(policy jsonb) returns text[]
language sql immutable parallel safe
as $$
    select array(
        select distinct n.name collate "C"
        from (
            select d.name
            from jsonb_array_elements_text(policy -> 'keys') as d (name)
            union all
            select f.name #>> '{}'
            from (
                select jsonb_path_query(policy, '$.fair.by[*]')
                union all
                select jsonb_path_query(policy, '$.limits[*].by[*]')
                union all
                select jsonb_path_query(policy, '$.partition.by[*]')
            ) as f (name)
            where jsonb_array_length(policy -> 'keys') = 0
        ) n
        where n.name not in ('priority', 'task')
        order by n.name collate "C"
    )
$$;

-- The keys that a job carries, in canonical form: those given, and those that the policy needs and the arguments name.
create function fairlane.stamped_keys(task text, queue text, policy jsonb, keys json, kwargs json) returns jsonb
language plpgsql stable
as $$
declare
    needed text[] := fairlane.needed_keys(policy);
    name text;
    stamped jsonb;
begin
    for name in select json_object_keys(keys) loop
        -- Whatever the database holds to be letters: signs and blanks are none.
        if name ~ '^$|^[0-9]|[\u0001-\u002f\u003a-\u0040\u005b-\u005e\u0060\u007b-\u007f]' then
            perform fairlane.refuse('FL002',
                'task ''%s'': keys: ''%s'' is not a key''s name; use letters, digits and underscores', task, name);
        elsif name in ('priority', 'task') then
            perform fairlane.refuse('FL002', 'task ''%s'': the key ''%s'' is built in and cannot be given', task, name);
        end if;
    end loop;
    select coalesce(jsonb_object_agg(g.name, fairlane.canonical_key(g.name, g.value)), '{}') into stamped
    from (
        select k.key as name, k.value
        from json_each(keys) k
        union all
        select n.name, kwargs -> n.name
        from unnest(needed) as n (name)
        where keys -> n.name is null and kwargs -> n.name is not null
    ) g;
    foreach name in array needed loop
        if not stamped ? name then
            perform fairlane.refuse('FL002',
                'queue ''%s'' needs the key ''%s'', which task ''%s'' does not carry; give the task a parameter ''%s'', '
                'name it in keys=, or enqueue with using(keys={''%s'': …})', queue, name, task, name, name);
        end if;
    end loop;
    return stamped;
end $$;

-- The partition that a job goes to: where its keys belong, unless its producer says otherwise.
create function fairlane.home_of(task text, queue text, place jsonb, keys jsonb, job uuid, partition integer, partition_key json)
returns text
language plpgsql stable
as $$
declare
    whole text := place ->> 'of';
    width integer := place ->> 'width';
    names text[] := array(select jsonb_array_elements_text(place -> 'by'));
    chosen integer;
begin
    if (place ->> 'index')::integer > 0 then
        perform fairlane.refuse('FL001',
            'task ''%s'': ''%s'' is a partition; enqueue to ''%s'', which finds it by the job''s keys%s', task, queue, whole,
            case when cardinality(names) > 0 then ''
                else format(', or with using(queue=''%s'', partition=%s)', whole, place ->> 'index') end);
    end if;
    if partition is null and partition_key is null then
        chosen := fairlane.partition_of(case when cardinality(names) = 0 then array[job::text]
            else array(select keys ->> n.name from unnest(names) with ordinality as n (name, at) order by n.at) end, width);
    elsif cardinality(names) > 0 then
        perform fairlane.refuse('FL001',
            'task ''%s'': queue ''%s'' is partitioned by %s, whose limits do not count a job that is elsewhere; '
            'leave partition= and partition_key= out, or declare the queue without partition_by',
            task, whole, array_to_string(names, ', '));
    elsif json_typeof(partition_key) = 'null' then
        chosen := 0;
    elsif partition_key is not null then
        chosen := fairlane.partition_of(array(
            select fairlane.canonical_key('partition_key', p.value)
            from json_array_elements(case json_typeof(partition_key) when 'array' then partition_key
                else json_build_array(partition_key) end) with ordinality as p (value, at)
            order by p.at
        ), width);
    elsif partition >= width then
        perform fairlane.refuse('FL001', 'task ''%s'': queue ''%s'' has partitions 0 to %s, not partition=%s; give one of these',
            task, whole, (width - 1)::text, partition::text);
    else
        chosen := partition;
    end if;
    return case when chosen = 0 then whole else whole || '__p' || chosen end;
end $$;

-- The numbers that a policy takes from its jobs. What gives them is a function in a Python program: here they are given.
create function fairlane.brought(queue text, policy jsonb, numbers json) returns text
language plpgsql stable
as $$
declare
    each record;
    given jsonb := '{}';
    number text;
begin
    for each in
        select l.name, l.document ->> 'kind' as kind from fairlane.limits_of(policy) l where l.is_brought
        union all
        select 'weight', 'weight' where policy #> '{fair,weight}' = '{"from": "job"}'
    loop
        number := numbers ->> each.name;
        if number is null then
            perform fairlane.refuse('FL001',
                'queue ''%s'': the policy in force takes ''%s'' from its jobs, and nothing here says how; give it: '
                'numbers => ''{"%s": …}''', queue, each.name, each.name);
        elsif json_typeof(numbers -> each.name) <> 'number'
            or (each.kind = 'weight' and number::numeric not between 0.000001 and 1000000)
            or (each.kind = 'concurrency' and (number !~ '^[0-9]+$' or number::numeric > 1000000000))
            or (each.kind = 'rolling_rate' and number !~ '^[0-9]+$')
            or (each.kind like '%rate' and number::numeric <= 0)
        then
            perform fairlane.refuse('FL001', 'queue ''%s'': %s=%s is not a number that it can have', queue, each.name, number);
        end if;
        given := given || jsonb_build_object(each.name, number::numeric);
    end loop;
    if exists (select from json_object_keys(numbers) as n (name) where not given ? n.name) then
        perform fairlane.refuse('FL001', 'queue ''%s'' takes no number ''%s'' from its jobs; leave it out', queue,
            (select n.name from json_object_keys(numbers) as n (name) where not given ? n.name limit 1));
    end if;
    return case when given = '{}' then null else given::text end;
end $$;

-- Refuses a job for which there is no room: as many wait as a backlog of its keys holds.
create function fairlane.check_backlogs(queue text, queue_id integer, policy jsonb, priority integer, keys jsonb, now bigint)
returns void
language plpgsql stable
as $$
declare
    each record;
    most numeric;
    waiting bigint;
begin
    if exists (select from fairlane.overrides o
               where o.queue_id = check_backlogs.queue_id and o.document::jsonb ->> 'kind' = 'suspend'
                 and coalesce((o.document::jsonb ->> 'expires_at')::bigint > now, true)) then
        return;
    end if;
    for each in
        select l.name, (l.document ->> 'max')::numeric as most, b.names, v.key
        from fairlane.limits_of(policy) l
        cross join lateral (select array(select jsonb_array_elements_text(l.document -> 'by')) as names) b
        cross join lateral (select array(
            select case n.name when 'priority' then check_backlogs.priority::text else check_backlogs.keys ->> n.name end
            from unnest(b.names) with ordinality as n (name, at) order by n.at
        ) as key) v
        where l.document ->> 'kind' = 'backlog' and l.document ->> 'when_full' = 'reject'
    loop
        select (o.document::jsonb ->> 'value')::numeric into most
        from fairlane.overrides o
        where o.queue_id = check_backlogs.queue_id and o.document::jsonb ->> 'kind' = 'limit'
          and o.document::jsonb ->> 'limit' = each.name
          and coalesce((o.document::jsonb ->> 'expires_at')::bigint > now, true)
          and o.document::jsonb -> 'scope' = (
            select coalesce(jsonb_agg(jsonb_build_array(n.name, n.value) order by n.name collate "C"), '[]')
            from unnest(each.names, each.key) as n (name, value)
          );
        most := coalesce(most, each.most);
        -- What claims have folded, and the bells that they have not: in one snapshot, so that they add up.
        select greatest(0, coalesce((
            select g.in_flight
            from fairlane.gates g
            where g.queue_id = check_backlogs.queue_id
              and g.id = fairlane.identity('fairlane/gate/1', array[queue, each.name] || each.key)
        ), 0) + coalesce((
            select sum(a.count)
            from fairlane.arrivals a
            where a.queue_id = check_backlogs.queue_id
              and a.xid >= (
                select least(s.arrivals_from, pg_snapshot_xmin(pg_current_snapshot()))
                from fairlane.queue_states s
                where s.queue_id = check_backlogs.queue_id
                order by s.version desc
                limit 1
              )
              and array(
                select case n.name when 'priority' then a.priority::text else a.keys ->> n.name end
                from unnest(each.names) with ordinality as n (name, at) order by n.at
              ) = each.key
        ), 0)) into waiting;
        if waiting >= most then
            perform fairlane.refuse('FL007',
                'queue ''%s''%s: %s jobs wait, and its backlog holds %s; nothing of this enqueue was stored. '
                'Wait for room (`await queue.pace(…)`) and enqueue again', queue,
                coalesce((select string_agg(', ' || n.name || '=' || coalesce(n.value, 'None'), '' order by n.at)
                          from unnest(each.names, each.key) with ordinality as n (name, value, at)), ''),
                to_char(waiting, 'FM999,999,999,999'), to_char(most, 'FM999,999,999,999'));
        end if;
    end loop;
end $$;

create function fairlane.enqueue(
    task text,
    args json default '[]',
    kwargs json default '{}',
    queue text default 'default',
    keys json default '{}',
    priority integer default 0,
    max_attempts integer default 5,
    delay interval default null,
    run_at timestamptz default null,
    id uuid default null,
    unique_key json default null,
    unique_until text default 'done',
    unique_window interval default null,
    on_conflict text default 'return',
    same_payload boolean default false,
    context json default null,
    numbers json default '{}',
    partition integer default null,
    partition_key json default null,
    out job uuid,
    out outcome text
)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    now bigint := fairlane.instant(null);
    what text := format('task ''%s''', task);
    policy jsonb;
    queue_number integer;
    home text := enqueue.queue;
    stamped jsonb;
    lane_keys jsonb;
    ordered jsonb;
    payload bytea;
    given text;
    wait bigint := round(extract(epoch from delay) * 1000000);
    due bigint := round(extract(epoch from run_at) * 1000000);
    key_id bytea;
    call_digest bytea;
    holder record;
begin
    if num_nulls(task, args, kwargs, queue, priority, max_attempts, unique_until, on_conflict, same_payload) > 0 then
        perform fairlane.refuse('FL001', 'task ''%s'': a parameter is null that cannot be; leave out what has a default', task);
    elsif priority not between -100 and 100 then
        perform fairlane.refuse('FL001', '%s: priority=%s is outside of -100 … 100; give one inside', what, priority::text);
    elsif max_attempts not between 1 and 10000 then
        perform fairlane.refuse('FL001', '%s: max_attempts=%s is not a whole number from 1 to 10,000; give one', what, max_attempts::text);
    elsif delay is not null and run_at is not null then
        perform fairlane.refuse('FL001', '%s: give delay= or run_at=, not both', what);
    elsif wait < 0 then
        perform fairlane.refuse('FL001', '%s: delay=''%s'' lies in the past; leave it out to run at once', what, delay::text);
    elsif wait > 3162240000000000 then
        perform fairlane.refuse('FL001', '%s: delay=''%s'' is longer than a hundred years', what, delay::text);
    elsif partition is not null and partition_key is not null then
        perform fairlane.refuse('FL001', '%s: give partition= or partition_key=, not both', what);
    elsif partition < 0 then
        perform fairlane.refuse('FL001', '%s: partition=%s is not the number of a partition, which count from 0', what,
            partition::text);
    elsif json_typeof(args) <> 'array' or json_typeof(kwargs) <> 'object' then
        perform fairlane.refuse('FL001', '%s: args is a JSON array and kwargs a JSON object', what);
    elsif json_typeof(keys) <> 'object' then
        perform fairlane.refuse('FL002', '%s: keys are a mapping of names to values, not a %s', what, json_typeof(keys));
    elsif json_typeof(context) <> 'object' then
        perform fairlane.refuse('FL001', '%s: context=%s is not a mapping of names to values', what, context::text);
    elsif octet_length(context::text) > 262144 then
        perform fairlane.refuse('FL003',
            '%s: its context takes %s bytes, more than the 262,144 allowed; give only what the policy asks for, '
            'or raise App(max_payload=…)', what, to_char(octet_length(context::text), 'FM999,999,999,999'));
    elsif unique_window <= interval '0' then
        perform fairlane.refuse('FL001', 'Unique: window=''%s'' is not a time above 0, such as ''10m''', unique_window::text);
    elsif unique_until not in ('started', 'done') then
        perform fairlane.refuse('FL001', 'Unique: until=''%s'' is not ''started'' or ''done''', unique_until);
    elsif on_conflict not in ('return', 'reject', 'replace') then
        perform fairlane.refuse('FL001', 'Unique: on_conflict=''%s'' is not ''return'', ''reject'' or ''replace''', on_conflict);
    end if;

    select q.id, q.policy::jsonb into queue_number, policy
    from fairlane.queues q
    where q.name = enqueue.queue;
    if policy is null then
        perform fairlane.refuse('FL008', '%s: queue ''%s'' is unknown; declare it with app.queue(…)', what, enqueue.queue);
    end if;
    job := coalesce(enqueue.id, fairlane.new_job_id(now));
    ordered := jsonb_path_query_first(policy, '$.limits[*] ? (@.kind == "sequence")');
    if ordered is not null and priority <> 0 then
        perform fairlane.refuse('FL001',
            '%s: priority=%s has no effect in queue ''%s'', whose jobs run one after the other (Sequence(by=%s)); leave it out',
            what, priority::text, enqueue.queue, case jsonb_array_length(ordered -> 'by')
                when 1 then format('''%s''', ordered #>> '{by,0}')
                else '(' || (select string_agg(format('''%s''', n), ', ') from jsonb_array_elements_text(ordered -> 'by') n) || ')'
            end);
    end if;
    stamped := fairlane.stamped_keys(task, enqueue.queue, policy, enqueue.keys, enqueue.kwargs);
    if policy ? 'partition' then
        home := fairlane.home_of(task, enqueue.queue, policy -> 'partition', stamped, job, enqueue.partition, enqueue.partition_key);
        queue_number := (select q.id from fairlane.queues q where q.name = home);
    elsif partition > 0 then
        perform fairlane.refuse('FL001',
            '%s: queue ''%s'' has no partition=%s, it is not divided; leave partition= out, or divide it: '
            '`fairlane partition %s --to …`', what, enqueue.queue, partition::text, enqueue.queue);
    end if;
    select coalesce(jsonb_object_agg(n.name, case n.name when 'task' then task else stamped ->> n.name end), '{}')
    into lane_keys
    from (
        select jsonb_array_elements_text(ordered -> 'by') as name
        union all
        -- Labels that were given besides tell no lane apart.
        select unnest(fairlane.needed_keys(policy) || array['task']) where ordered is null
    ) n;
    given := fairlane.brought(enqueue.queue, policy, numbers);
    -- Without blanks between its parts, as Python writes it: the same call has the same digest, whoever made it.
    payload := convert_to('[' || regexp_replace(args::text, '("(?:[^"\\]|\\.)*")|\s+', '\1', 'g') || ','
        || regexp_replace(kwargs::text, '("(?:[^"\\]|\\.)*")|\s+', '\1', 'g') || ']', 'UTF8');
    if length(payload) > 262144 then
        perform fairlane.refuse('FL003',
            '%s: its arguments take %s bytes, more than the 262,144 allowed; store the data elsewhere and pass its address, '
            'or raise App(max_payload=…)', what, to_char(length(payload), 'FM999,999,999,999'));
    end if;
    if delay is null and run_at is null then
        perform fairlane.check_backlogs(home, queue_number, policy, priority, lane_keys, now);
    end if;

    outcome := 'enqueued';
    if unique_key is not null and json_typeof(unique_key) <> 'null' then
        key_id := fairlane.identity('fairlane/unique/1', array[task] || array(
            select fairlane.canonical_key('unique', u.value, what || ': ')
            from json_array_elements(case json_typeof(unique_key) when 'array' then unique_key
                else json_build_array(unique_key) end) with ordinality as u (value, at)
            order by u.at
        ));
        call_digest := substring(sha256(payload) from 1 for 16);
        -- Nobody else decides on this key until the transaction has ended.
        insert into fairlane.uniques as u (id) values (key_id) on conflict (id) do update set id = excluded.id;
        -- A window is counted from here, once nobody else decides on the key; so is the job's enqueue.
        now := fairlane.instant(null);
        select u.job, u.digest, u.until, u.expires_at, j.state, j.claimed_at is not null as has_started into holder
        from fairlane.uniques u
        left join fairlane.jobs j on j.id = u.job
        where u.id = key_id;
        if holder.job = job and holder.state is not null then
            perform fairlane.refuse('FL004',
                'there is a job %s already, and nothing of this enqueue was stored; give each job an id of its own, or none',
                job::text);
        end if;
        if (case holder.until when 2 then holder.expires_at > now when 0 then holder.state < 3 and not holder.has_started
            else holder.state < 3 end) then
            if same_payload and holder.digest <> call_digest then
                perform fairlane.refuse('FL006',
                    '%s: job %s holds this unique key with other arguments, and nothing of this enqueue was stored; '
                    'a key names one call: give another call another key', what, holder.job::text);
            elsif on_conflict = 'reject' then
                perform fairlane.refuse('FL005',
                    '%s: job %s holds this unique key, and nothing of this enqueue was stored; '
                    'wait for it to end, or enqueue with on_conflict=''return'' or ''replace''', what, holder.job::text);
            elsif on_conflict = 'return' then
                job := holder.job;
                outcome := 'duplicate';
                return;
            elsif holder.state < 2 and (
                select c.state = 5 from fairlane.cancel_job(holder.job, null, true, format('replaced by job %s', job)) c
            ) then
                outcome := 'replaced';
            end if;
        end if;
        update fairlane.uniques u
        set job = enqueue.job, digest = call_digest,
            until = case when unique_window is not null then 2 when unique_until = 'started' then 0 else 1 end,
            expires_at = now + round(extract(epoch from unique_window) * 1000000)::bigint
        where u.id = key_id;
        insert into fairlane.unique_jobs (job, key, until)
        values (job, key_id, case when unique_window is not null then 2 when unique_until = 'started' then 0 else 1 end)
        on conflict do nothing;
    end if;

    begin
        perform fairlane.store_job(case when key_id is not null then now end, true, job, queue_number, task, priority::smallint,
            fairlane.lane_id(home, priority, lane_keys),
            case when lane_keys = stamped || jsonb_build_object('task', task) then null else lane_keys end, stamped, payload,
            max_attempts, wait, due, null, given, context::text);
    exception when unique_violation then
        perform fairlane.refuse('FL004',
            'there is a job %s already, and nothing of this enqueue was stored; give each job an id of its own, or none',
            job::text);
    end;
end $$;
comment on function fairlane.enqueue is 'Stores a job as a Python producer would. See docs/how-to/enqueue-from-any-language.md.';

create function fairlane.cancel(job uuid) returns text
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_in integer;
begin
    select c.state into found_in from fairlane.cancel_job(job, null, false, null) c;
    if found_in is null then
        perform fairlane.refuse('FL009', 'there is no job %s; it was never stored, or its retention has passed', job::text);
    end if;
    return (array['scheduled', 'ready', 'running', 'done', 'dead', 'cancelled'])[found_in + 1];
end $$;
comment on function fairlane.cancel is 'Cancels a job that waits, asks one that runs to stop; returns the state it is in now.';

create function fairlane.job_status(job uuid) returns text
language sql stable
security definer
set search_path = pg_catalog, pg_temp
as $$
    select (array['scheduled', 'ready', 'running', 'done', 'dead', 'cancelled'])[j.state + 1]
    from fairlane.jobs j
    where j.id = job
$$;
comment on function fairlane.job_status is 'The state of a job; null where there is none.';

-- They act with the rights of who has migrated. Whom these are for: `grant execute on function …`.
revoke execute on function fairlane.enqueue, fairlane.cancel, fairlane.job_status from public;
