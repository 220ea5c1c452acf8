-- name: select_schedules
select name, digest, document, next_at, is_paused, triggers, triggered, last_slot, last_job, last_fired_at, declared_at
from schedules
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
-- Whoever changes the row has fired; who comes second finds it changed.
update schedules
set next_at = ?, triggered = ?, last_slot = coalesce(?, last_slot), last_job = coalesce(?, last_job), last_fired_at = ?
where name = ? and digest = ? and next_at is ? and triggered = ? and is_paused = ?

-- name: amend_schedule
update schedules
set is_paused = ?, next_at = ?, triggers = ?
where name = ?
