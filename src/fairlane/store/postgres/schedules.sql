-- part: schedules
select name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at
from fairlane.schedules

-- name: select_schedules
{schedules}
order by name collate "C"

-- name: select_schedules_named
{schedules}
where name = any ($1::text[])
order by name collate "C"

-- name: lock_schedule
{schedules}
where name = $1
for update

-- name: insert_schedule
-- $1 now or null, $2 name, $3 digest, $4 document, $5 the next slot
insert into fairlane.schedules (declared_at, name, digest, document, next_at)
values (fairlane.instant($1::bigint), $2, $3, $4, $5::bigint)
on conflict (name) do nothing
returning true

-- name: replace_schedule
-- Another declaration of the same name: it keeps whether it is paused, and what it has fired. $6 the digest it had
update fairlane.schedules
set digest = $3, document = $4, next_at = $5::bigint, declared_at = fairlane.instant($1::bigint)
where name = $2 and digest = $6
returning true

-- name: keep_schedules
-- In the order of their names: two that keep the same ones never deadlock. $1 now or null, $2 names, $3 digests,
-- $4 by whom: it need not be known, for every listener is told
with kept as (
    select s.name
    from unnest($2::text[], $3::bytea[]) as given (name, digest)
    cross join lateral (
        select name from fairlane.schedules where name = given.name and digest = given.digest for update
    ) s
    order by given.name collate "C"
)
update fairlane.schedules
set declared_at = fairlane.instant($1::bigint)
where name = any (array(select name from kept)) and ($4::uuid is null or true)

-- name: fire_schedule
-- Whoever changes the row has fired; who comes second waits for the first, and finds it changed.
-- Without a slot nothing was fired, and what was fired last stays.
-- $1 now or null, $2 the next slot, $3 triggers fired, $4 slot, $5 job; then how it stood: $6 name, $7 digest,
-- $8 the next slot, $9 triggers fired, $10 whether it was paused
update fairlane.schedules
set next_at = $2::bigint, triggered = $3::bigint, last_slot = coalesce($4::bigint, last_slot),
    last_job = case when $4::bigint is null then last_job else $5::uuid end,
    last_fired_at = case when $4::bigint is null then last_fired_at else fairlane.instant($1::bigint) end
where name = $6 and digest = $7 and next_at is not distinct from $8::bigint and triggered = $9::bigint
    and is_paused = $10::boolean
returning true

-- name: name_last_job
-- Another job stands for the slot than the one that was made for it, or none.
update fairlane.schedules
set last_job = $2::uuid
where name = $1

-- name: announce_schedules
-- Heard by every worker once this is committed, and by whoever has schedules looked at: operators act seldom.
select pg_notify('fairlane', 'schedules')

-- name: change_schedule
update fairlane.schedules
set is_paused = $2::boolean, next_at = $3::bigint, triggers = $4::bigint
where name = $1
returning name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at

-- name: this_transaction
-- What it is known by once its connection is lost.
select pg_current_xact_id()::text

-- name: has_committed
-- Whether an earlier transaction has, whose end was not heard of. $1 what it is known by
select pg_xact_status($1::text::xid8) = 'committed'
