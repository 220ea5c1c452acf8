-- Most flows that a claim writes stand as they stood: one job of theirs has started, others have ended. What changes then is
-- a third of what can change, and a claim writes hundreds of them.

create type fairlane.served_flow as (
    place tid,
    vtime double precision,
    tie bigint,
    cost double precision,
    debt double precision,
    lane_ready integer,
    lane_in_flight integer,
    lane_floor bigint
);
