-- The condition of the file, for whoever looks for what is wrong.

-- name: select_journal_mode
pragma journal_mode

-- name: select_page_count
pragma page_count

-- name: select_page_size
pragma page_size

-- name: select_flows_behind
-- Flows that lie before the cursor, where no claim looks. ?1 queue, ?2 and ?3 the cursor
select id, null, key, open, null
from flows
where queue = ?1 and standing = 1 and (vtime, tie) < (?2, ?3)

-- name: select_overdue_gates
-- Gates with lanes on them that were to be woken before ?2.
select id, "limit", key, waiting, wake_at
from gates
where queue = ?1 and wake_at is not null and wake_at < ?2 and waiting > 0
order by wake_at
