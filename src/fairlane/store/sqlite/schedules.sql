-- name: select_schedules
select name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at
from schedules
order by name

-- name: select_schedules_named
select name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at
from schedules
where name in (select value from json_each(?))
order by name

-- name: select_schedule
select name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at
from schedules
where name = ?

-- name: insert_schedule
insert into schedules (name, digest, document, next_at, declared_at)
values (?, ?, ?, ?, ?)
on conflict (name) do nothing

-- name: replace_schedule
-- Another declaration of the same name: it keeps whether it is paused, and what it has fired.
update schedules
set digest = ?, document = ?, next_at = ?, declared_at = ?
where name = ? and digest = ?

-- name: keep_schedule
update schedules
set declared_at = ?
where name = ? and digest = ?

-- name: fire_schedule
-- Whoever changes the row has fired; who comes second finds it changed. Without a slot nothing was fired, and what was
-- fired last stays. ?1 the next slot, ?2 triggers fired, ?3 slot, ?4 job, ?5 now; then how it stood: ?6 name, ?7 digest,
-- ?8 the next slot, ?9 triggers fired, ?10 whether it was paused
update schedules
set next_at = ?1, triggered = ?2, last_slot = coalesce(?3, last_slot), last_job = iif(?3 is null, last_job, ?4),
    last_fired_at = iif(?3 is null, last_fired_at, ?5)
where name = ?6 and digest = ?7 and next_at is ?8 and triggered = ?9 and is_paused = ?10

-- name: name_last_job
-- Another job stands for the slot than the one that was made for it, or none.
update schedules
set last_job = ?
where name = ?

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

-- name: amend_schedule
update schedules
set is_paused = ?, next_at = ?, triggers = ?
where name = ?
