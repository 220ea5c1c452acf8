-- The condition of the file, for whoever looks for what is wrong.

-- name: select_journal_mode
pragma journal_mode

-- name: select_page_count
pragma page_count

-- name: select_page_size
pragma page_size

-- name: select_standstills
-- Flows that lie before the cursor, where no claim looks; and gates with lanes on them that were to be woken before ?2.
-- 1 queue, 2 before when, 3 how many
select null, f.key, f.open, null
from queues q
cross join flows f on f.queue = q.id and f.standing = 1 and (f.vtime, f.tie) < (q.cursor, q.cursor_tie)
where q.name = ?1
union all
select * from (
    select g."limit", g.key, g.waiting, g.wake_at
    from queues q
    cross join gates g on g.queue = q.id and g.wake_at is not null and g.wake_at < ?2 and g.waiting > 0
    where q.name = ?1
    order by g.wake_at
    limit ?3
)
limit 2 * ?3
