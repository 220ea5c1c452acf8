-- What limits keep besides a count and an instant, and the bound that a job brought along.
alter table fairlane.gates
    add column memo text,
    add column value double precision;
comment on column fairlane.gates.memo is 'JSON; what it says is known to its limit alone.';
comment on column fairlane.gates.value is 'The bound that the newest job of its key brought along; null: what the policy says.';
alter type fairlane.touched_gate
    add attribute memo text,
    add attribute value double precision;

-- What settlements say of the runs that they end. Null where all went well.
alter table fairlane.releases
    add column failed integer[],
    add column neutral integer[],
    add column latest bigint[];
alter table fairlane.releases alter column latest set storage external;
alter type fairlane.settlement add attribute verdict smallint;

create function fairlane.keys_of_lane(lane_keys jsonb, keys jsonb, task text) returns jsonb
language sql immutable parallel safe
as $$ select coalesce(lane_keys, keys || jsonb_object(array['task', task])) $$;
comment on function fairlane.keys_of_lane is 'What tells a job''s lane apart: all of its keys and its task, unless it says otherwise.';
comment on column fairlane.jobs.lane_keys is 'What tells lanes apart, if it is not all of `keys` and the task.';
