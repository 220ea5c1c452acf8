-- name: select_schedules
select name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at
from schedules
order by name

-- name: select_schedules_named
select name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at
from schedules
where name in (select value from json_each(?))
order by name

-- name: lock_schedule
select name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at
from schedules
where name = ?

-- name: insert_schedule
-- ?1 now, ?2 name, ?3 digest, ?4 document, ?5 the next slot
insert into schedules (declared_at, name, digest, document, next_at)
values (?1, ?2, ?3, ?4, ?5)
on conflict (name) do nothing

-- name: replace_schedule
-- Another declaration of the same name: it keeps whether it is paused, and what it has fired. ?6 the digest it had
update schedules
set digest = ?3, document = ?4, next_at = ?5, declared_at = ?1
where name = ?2 and digest = ?6

-- name: keep_schedule
update schedules
set declared_at = ?
where name = ? and digest = ?

-- name: fire_schedule
-- Whoever changes the row has fired; who comes second finds it changed. Without a slot nothing was fired, and what was
-- fired last stays. ?1 now, ?2 the next slot, ?3 triggers fired, ?4 slot, ?5 job; then how it stood: ?6 name, ?7 digest,
-- ?8 the next slot, ?9 triggers fired, ?10 whether it was paused
update schedules
set next_at = ?2, triggered = ?3, last_slot = coalesce(?4, last_slot), last_job = iif(?4 is null, last_job, ?5),
    last_fired_at = iif(?4 is null, last_fired_at, ?1)
where name = ?6 and digest = ?7 and next_at is ?8 and triggered = ?9 and is_paused = ?10

-- name: name_last_job
-- Another job stands for the slot than the one that was made for it, or none.
update schedules
set last_job = ?2
where name = ?1

-- name: put_schedule_holder
insert into schedule_holders (worker, kept_at)
values (?, ?)
on conflict (worker) do update set kept_at = excluded.kept_at

-- name: forget_schedule_holders
delete from schedule_holders
where kept_at < ?

-- name: select_schedule_holders
select worker
from schedule_holders

-- name: change_schedule
update schedules
set is_paused = ?2, next_at = ?3, triggers = ?4
where name = ?1
returning name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at

-- name: this_transaction
-- A write is not tried again: nothing has to be known of it.
select null

-- name: has_committed
select ?1 is not null
