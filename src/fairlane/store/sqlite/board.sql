-- The tables of the board: asked for what memory does not hold, and written at checkpoints.

-- name: select_lanes
-- ?1 queue, ?2 how many, ?3 their ids, one after the other. So are flows, gates and claims looked up: a statement for each of
-- them would cost more than its row.
with recursive numbers (n) as (select 0 union all select n + 1 from numbers where n + 1 < ?2)
select id, flow, priority, keys, ready, in_flight, floor, rank, standing, gate, tag, head
from numbers
cross join lanes on lanes.queue = ?1 and lanes.id = substr(?3, 16 * n + 1, 16)

-- name: select_flows
with recursive numbers (n) as (select 0 union all select n + 1 from numbers where n + 1 < ?2)
select id, key, weight, vtime, tie, cost, debt, open, shut, standing, gate, given_by
from numbers
cross join flows on flows.queue = ?1 and flows.id = substr(?3, 16 * n + 1, 16)

-- name: select_gates
with recursive numbers (n) as (select 0 union all select n + 1 from numbers where n + 1 < ?2)
select id, "limit", key, in_flight, tat, waiting, awake, wake_at, memo, value, given_by
from numbers
cross join gates on gates.queue = ?1 and gates.id = substr(?3, 16 * n + 1, 16)

-- part: flows
select id, key, weight, vtime, tie, cost, debt, open, shut, standing, gate, given_by
from flows

-- name: scan_flows
-- Flows that take turns, from there on. They are read one by one, until there are enough. ?1 queue, ?2 and ?3 from where
{flows}
where queue = ? and standing = 1 and (vtime, tie) >= (?, ?)
order by vtime, tie

-- part: lanes
select id, flow, priority, keys, ready, in_flight, floor, rank, standing, gate, tag, head
from lanes

-- name: select_ready_lanes
{lanes}
where flow = ? and standing = 1
order by rank, head

-- name: select_parked_lanes
{lanes}
where gate = ? and standing = 2
order by tag, head

-- name: select_parked_flows
{flows}
where gate = ? and standing = 2
order by vtime, tie

-- part: gates
select id, "limit", key, in_flight, tat, waiting, awake, wake_at, memo, value, given_by
from gates

-- name: select_alarms
-- Gates to be woken after a time, the first of them first. ?1 queue, ?2 after when
{gates}
where queue = ? and wake_at is not null and wake_at > ?
order by wake_at

-- name: select_all_lanes
{lanes}
where queue = ?

-- name: select_all_flows
{flows}
where queue = ?

-- name: select_all_gates
{gates}
where queue = ?

-- name: put_flows
insert into flows (queue, id, key, weight, vtime, tie, cost, debt, open, shut, standing, gate, given_by, given_at)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
on conflict (queue, id) do update
set weight = excluded.weight, vtime = excluded.vtime, tie = excluded.tie, cost = excluded.cost, debt = excluded.debt,
    open = excluded.open, shut = excluded.shut, standing = excluded.standing, gate = excluded.gate,
    given_at = iif(given_by = excluded.given_by, given_at, excluded.given_at), given_by = excluded.given_by

-- name: put_lanes
insert into lanes (queue, id, flow, priority, keys, ready, in_flight, floor, rank, standing, gate, tag, head)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
on conflict (queue, id) do update
set flow = excluded.flow, ready = excluded.ready, in_flight = excluded.in_flight, floor = excluded.floor,
    rank = excluded.rank, standing = excluded.standing, gate = excluded.gate, tag = excluded.tag, head = excluded.head

-- name: put_gates
insert into gates (queue, id, "limit", key, in_flight, tat, waiting, awake, wake_at, memo, value, given_by)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
on conflict (queue, id) do update
set in_flight = excluded.in_flight, tat = excluded.tat, waiting = excluded.waiting, awake = excluded.awake,
    wake_at = excluded.wake_at, memo = excluded.memo, value = excluded.value, given_by = excluded.given_by

-- name: note_change
-- The queue's own numbers, and by how much ready and running jobs and parked lanes have changed.
update queues
set vtime = ?, cursor = ?, cursor_tie = ?, tie = ?, cost = ?, ready = ready + ?, running = running + ?, parked = parked + ?,
    seq = ?, token = ?
where id = ?

-- name: insert_delta
-- Append a change to the journal.
insert into journal (queue, seq, token, delta, stats)
values (?, ?, ?, ?, ?)

-- name: select_deltas
-- ?1 queue, ?2 after which change
select seq, token, delta
from journal
where queue = ? and seq > ?
order by seq

-- name: has_delta
select exists (select 1 from journal where queue = ? and seq = ? and token = ?)

-- name: store_journal
-- The tables hold every change up to this one. ?1 queue, ?2 the change
update queues
set base = stored, stored = ?2
where id = ?1

-- name: delete_deltas
-- Those who know a state since the last checkpoint can still catch up.
delete from journal
where queue = ?1
  and seq < (select base from queues where id = ?1)
  and (stats is null or seq <= (select counted from queue_stats where queue = ?1))

-- name: seal_journal
-- The tables are being worked on: whoever remembers anything reads them again. ?1 queue, ?2 a token
update queues
set seq = seq + 1, token = ?2, base = seq + 1, stored = seq + 1
where id = ?1

-- name: note_stats
-- What the change that sealed the journal tells.
insert into journal (queue, seq, token, delta, stats)
select id, seq, token, x'', ?2
from queues
where id = ?1

-- name: replace_state
-- The board was made anew. ?1 queue, ?2 to ?6 its state, ?7 ready, ?8 running, ?9 parked
update queues
set vtime = ?2, cursor = ?3, cursor_tie = ?4, tie = ?5, cost = ?6, ready = ?7, running = ?8, parked = ?9
where id = ?1

-- name: note_removed
-- Collection has removed lanes: the queue no longer counts what they counted. ?1 queue, ?2 change, ?3 token, ?4 and ?5 ready and running jobs that idle lanes counted
update queues
set seq = ?2, token = ?3, ready = ready - ?4, running = running - ?5
where id = ?1

-- name: delete_flows
-- All flows of a queue: its board is made anew.
delete from flows
where queue = ?

-- name: delete_lanes
-- All lanes of a queue: its board is made anew.
delete from lanes
where queue = ?

-- name: delete_gates
-- All gates of a queue: its board is made anew.
delete from gates
where queue = ?

-- name: walk_idle_lanes
-- Collection walks the lanes a stretch at a time: an index of idle ones would have to be written again and again.
select id, ready, in_flight, standing = 0 and ready <= 0 and in_flight <= 0
from lanes
where id > ?1 and queue = ?2
order by id
limit ?3

-- name: delete_lane
delete from lanes
where queue = ? and id = ?

-- name: walk_idle_flows
-- Without lanes, and its tag behind the queue's virtual time: forgetting it gives no credit. A weight that a job brought
-- along outlives its jobs for a time, ?5: others of its key may be due later.
select id,
    standing = 0
    and (given_by = 0 or given_at <= ?4 - ?5)
    and vtime + debt <= (select queues.vtime from queues where queues.id = ?2)
    and not exists (select 1 from lanes where lanes.flow = flows.id)
from flows
where id > ?1 and queue = ?2
order by id
limit ?3

-- name: delete_flow
delete from flows
where queue = ? and id = ?

-- name: walk_idle_gates
-- A number that a job brought along outlives its jobs for a time, ?5: others of its key may be due later.
select id, in_flight <= 0 and waiting <= 0 and awake <= 0 and tat <= ?4 - (value is not null) * ?5
from gates
where id > ?1 and queue = ?2
order by id
limit ?3

-- name: delete_gate
delete from gates
where queue = ? and id = ?
