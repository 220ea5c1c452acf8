-- Settling, and asking for work in the same call: what a worker of few slots does all the time.

create function fairlane.settle_done(bigint, fairlane.done[], uuid[]) returns uuid[]
language plpgsql volatile
as $$
declare
    settled record;
begin
    with
    clock as materialized (
        select fairlane.instant($1::bigint) as now
    ),
    ended as (
        update fairlane.jobs j
        set state = 3, outcome = 'done', finished_at = g.now, result = g.result, error = null
        from (
            select u.*, clock.now
            from clock
            cross join unnest($2::fairlane.done[]) u
        ) g
        where j.id = any (array[g.id]) and j.lease = g.lease and j.state = 2
        returning j.id, j.queue_id, j.lane, j.task, j.shared, j.shared_limits, j.charge, j.claimed_at, g.ran, g.now
    ),
    freed as (
        insert into fairlane.releases (queue_id, lanes, ended, ran, charged, unstarted, refund, since, latest)
        select queue_id, array_agg(lane), array_agg(ended), array_agg(ran), array_agg(charged),
            array_fill(0, array[count(*)::integer]), array_fill(0::double precision, array[count(*)::integer]),
            array_fill(0::bigint, array[count(*)::integer]), array_agg(latest)
        from (
            select queue_id, lane, count(*)::integer as ended, sum(ran)::bigint as ran, sum(charge) as charged,
                max(claimed_at) as latest
            from ended
            group by queue_id, lane
        ) by_lane
        group by queue_id
        returning queue_id
    ),
    -- From the jobs' rows alone: after a wait for one of them, another table would be read as it was before.
    passed as materialized (
        select s.shared_limit, s.gate, e.queue_id, e.task, count(*)::integer as ended, sum(e.ran)::bigint as ran,
            max(e.claimed_at) as latest
        from ended e
        cross join unnest(e.shared_limits, e.shared) as s (shared_limit, gate)
        group by s.shared_limit, s.gate, e.queue_id, e.task
    ),
    freed_shared as (
        insert into fairlane.shared_releases (shared_limit, gate, queue_id, task, ended, ran, unstarted, since, failed, neutral,
            latest)
        select shared_limit, gate, queue_id, task, ended, ran, 0, 0, 0, 0, latest
        from passed
    ),
    filed as (
        insert into fairlane.finished (is_dead, at, jobs)
        select false, now, array_agg(id)
        from ended
        group by now
    ),
    dropped as (
        delete from fairlane.leases
        where id = any (array(select l.id from fairlane.leases l where l.id = any ($3::uuid[]) for update skip locked))
    ),
    forgotten as (
        delete from fairlane.cancellations
        where lease = any ($3::uuid[])
    ),
    -- Where jobs wait for slots, one waiter is told, although the settling worker claims for its own slots as a rule.
    woken as (
        select sum(fairlane.nudge(f.queue_id, 1)) as told
        from (
            select queue_id
            from freed
            union
            select q.queue_id
            from passed p
            cross join lateral (
                select q.queue_id from fairlane.shared_limit_queues q where q.shared_limit = p.shared_limit limit 1000
            ) q
        ) f
        where (select true from fairlane.waiters w where w.queue_id = f.queue_id limit 1)
          and (
            select s.ready > 0
            from fairlane.queue_states s
            where s.queue_id = f.queue_id
            order by s.version desc
            limit 1
          )
    )
    select
        case when (select count(*) from ended) = cardinality($2) then '{}'
            else array(select u.id from unnest($2) u except select id from ended) end as lost,
        woken.told,
        -- (The condition is for the planner, which may not walk an index without one.)
        case when exists (select from fairlane.result_listeners l where l.waiter >= '00000000-0000-0000-0000-000000000000')
            then fairlane.announce(array(select id from ended)) end as announced
    into settled
    from woken;
    return settled.lost;
end
$$;
comment on function fairlane.settle_done is 'End claims whose jobs are all done. Given: the time or null, settlements, leases that hold nothing more. Returns the jobs whose claim was lost.';

create type fairlane.request as (
    lease uuid,
    asked bigint,
    worker_id uuid,
    worker text,
    duration bigint
);

create type fairlane.granted as (
    id uuid,
    task text,
    priority smallint,
    keys jsonb,
    payload bytea,
    attempt integer,
    max_attempts integer,
    enqueued_at bigint,
    cancel_requested boolean,
    suspicion smallint,
    claimed_at bigint
);

create procedure fairlane.settle_and_enter(
    given_time bigint,
    settlements fairlane.done[],
    emptied uuid[],
    queue integer,
    request bigint,
    own_lease uuid,
    inout lost uuid[],
    inout requests fairlane.request[],
    inout grants fairlane.granted[]
)
language plpgsql
as $$
begin
    lost := fairlane.settle_done(given_time, settlements, emptied);
    -- Whatever becomes of the claim, this is settled; and whoever leads while we wait sees what it has freed.
    commit;
    select
        array_agg(row(e.lease, e.asked, e.worker_id, e.worker, e.duration)::fairlane.request)
            filter (where e.lease is not null),
        array_agg(row(e.id, e.task, e.priority, e.keys, e.payload, e.attempt, e.max_attempts, e.enqueued_at,
            e.cancel_requested, e.suspicion, e.claimed_at)::fairlane.granted) filter (where e.id is not null)
    into requests, grants
    from fairlane.enter(queue, request, own_lease) e;
end
$$;
comment on procedure fairlane.settle_and_enter is 'Settle jobs that are done, durably; then enter the claim lock of a queue. What `enter` returns comes as requests, or as grants.';
