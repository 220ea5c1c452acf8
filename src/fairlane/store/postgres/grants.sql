-- What each role may do, and no more. Tables are listed one by one, so that a new table is nobody's until someone decides
-- whose it is; a test compares these lists with the schema. Identity columns need no right to their sequence.
-- Only the owner, who migrates, may change or delete what the audit says.

-- name: everybody
-- Take back what was granted before, by hand or by default privileges: a right that is not listed here is not held.
alter default privileges in schema fairlane revoke all on tables from {role};
alter default privileges in schema fairlane revoke all on sequences from {role};
alter default privileges in schema fairlane revoke all on routines from {role};
revoke all on all tables in schema fairlane from {role};
revoke all on all sequences in schema fairlane from {role};
revoke all on all routines in schema fairlane from {role};
revoke all on schema fairlane from {role};
grant usage on schema fairlane to {role};
grant select on fairlane.migrations to {role};
grant select on sequence fairlane.time_ahead, fairlane.time_latest to {role};

-- name: producer
-- Enqueues, waits for results, explains and cancels jobs, keeps values, declares new queues and shared limits, and changes
-- none that are there. To know how much of a backlog waits it may have to fold what is pending, and so writes the state of
-- the queue.
grant select on fairlane.arrivals, fairlane.attempts, fairlane.claimers, fairlane.flows, fairlane.forced, fairlane.gates,
    fairlane.jobs, fairlane.journal, fairlane.key_stats, fairlane.lanes, fairlane.leases, fairlane.overrides,
    fairlane.queue_stats, fairlane.queue_states, fairlane.queues, fairlane.releases, fairlane.result_listeners,
    fairlane.result_waiters, fairlane.gate_wakeups, fairlane.schedules, fairlane.shared_gates, fairlane.shared_limit_queues,
    fairlane.shared_limits, fairlane.shared_releases, fairlane.shared_states, fairlane.stored_values, fairlane.unique_jobs, fairlane.uniques,
    fairlane.waiters, fairlane.workers to {role};
grant insert on fairlane.arrivals, fairlane.cancellations, fairlane.finished, fairlane.flows, fairlane.gates, fairlane.jobs,
    fairlane.journal, fairlane.lanes, fairlane.leases, fairlane.queue_states, fairlane.queues, fairlane.result_listeners,
    fairlane.result_waiters, fairlane.gate_wakeups, fairlane.shared_gates, fairlane.shared_limit_queues, fairlane.shared_limits,
    fairlane.shared_states, fairlane.stored_values, fairlane.unique_jobs, fairlane.uniques to {role};
grant update on fairlane.flows, fairlane.gates, fairlane.jobs, fairlane.lanes, fairlane.queue_states,
    fairlane.shared_gates, fairlane.shared_states, fairlane.stored_values, fairlane.uniques to {role};
grant delete on fairlane.arrivals, fairlane.flows, fairlane.gates, fairlane.journal, fairlane.lanes, fairlane.releases,
    fairlane.result_listeners, fairlane.result_waiters, fairlane.gate_wakeups, fairlane.shared_gates, fairlane.shared_limit_queues,
    fairlane.shared_releases, fairlane.stored_values to {role};
grant usage on sequence fairlane.positions to {role};
grant execute on function fairlane.cancel, fairlane.enqueue, fairlane.job_status to {role};

-- name: worker
-- Claims, settles, fires schedules and does the upkeep; enqueues as well. It ends overrides whose time has come, copies
-- them to new partitions when it finishes a change that somebody began, and records both.
grant select, insert, update, delete on fairlane.arrivals, fairlane.attempts, fairlane.cancellations, fairlane.claimers,
    fairlane.finished, fairlane.flows, fairlane.forced, fairlane.gates, fairlane.jobs, fairlane.key_stats, fairlane.lanes,
    fairlane.leases, fairlane.minutes, fairlane.overrides, fairlane.queue_stats, fairlane.releases,
    fairlane.result_listeners, fairlane.result_waiters, fairlane.gate_wakeups, fairlane.shared_gates, fairlane.shared_limit_queues,
    fairlane.shared_limits, fairlane.shared_releases, fairlane.shared_states, fairlane.stored_values,
    fairlane.unique_jobs, fairlane.uniques, fairlane.waiters, fairlane.workers to {role};
grant select, insert, update on fairlane.queue_states, fairlane.queues, fairlane.schedules to {role};
grant select, insert, delete on fairlane.journal to {role};
grant select, delete on fairlane.ended_sessions to {role};
grant insert on fairlane.audit to {role};
grant usage on sequence fairlane.positions to {role};
grant update on sequence fairlane.time_ahead, fairlane.time_latest to {role};
grant execute on function fairlane.cancel, fairlane.enqueue, fairlane.job_status to {role};

-- name: viewer
-- Looks at everything but the values that programs keep, and may log out.
grant select on fairlane.arrivals, fairlane.attempts, fairlane.audit, fairlane.cancellations, fairlane.claimers,
    fairlane.ended_sessions, fairlane.finished, fairlane.flows, fairlane.forced, fairlane.gates, fairlane.jobs,
    fairlane.journal, fairlane.key_stats, fairlane.lanes, fairlane.leases, fairlane.minutes, fairlane.overrides,
    fairlane.queue_stats, fairlane.queue_states, fairlane.queues, fairlane.releases, fairlane.result_listeners,
    fairlane.result_waiters, fairlane.gate_wakeups, fairlane.schedules, fairlane.shared_gates, fairlane.shared_limit_queues, fairlane.shared_limits,
    fairlane.shared_releases, fairlane.shared_states, fairlane.unique_jobs, fairlane.uniques,
    fairlane.waiters, fairlane.workers to {role};
grant insert on fairlane.ended_sessions to {role};

-- name: operator
-- Looks, and does what operators do, each time with an entry in the audit. Whoever changes the number of partitions ends
-- the claims of dead workers on the way, whose jobs may leave effects: new jobs, and values, which it cannot read.
grant select, insert, update, delete on fairlane.arrivals, fairlane.attempts, fairlane.cancellations, fairlane.claimers,
    fairlane.finished, fairlane.flows, fairlane.forced, fairlane.gates, fairlane.jobs, fairlane.lanes, fairlane.leases,
    fairlane.overrides, fairlane.releases, fairlane.result_listeners, fairlane.result_waiters, fairlane.gate_wakeups,
    fairlane.shared_gates, fairlane.shared_limit_queues, fairlane.shared_limits, fairlane.shared_releases,
    fairlane.shared_states, fairlane.unique_jobs, fairlane.uniques, fairlane.waiters to {role};
grant select, insert, update on fairlane.queue_states, fairlane.queues to {role};
grant select, insert, delete on fairlane.journal to {role};
grant select, update on fairlane.schedules to {role};
grant select, insert on fairlane.audit, fairlane.ended_sessions to {role};
grant select, insert, update, delete on fairlane.key_stats, fairlane.minutes, fairlane.queue_stats to {role};
grant select on fairlane.workers to {role};
grant select (key), insert, update, delete on fairlane.stored_values to {role};
grant usage on sequence fairlane.positions to {role};
