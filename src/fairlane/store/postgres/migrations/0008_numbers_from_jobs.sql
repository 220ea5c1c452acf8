-- Numbers that jobs bring along for their queue's policy, and what their producers told of them besides. JSON; null as a rule.
-- `given_by` is the position that the job had at its enqueue: of two numbers for one key, the one with the higher position
-- holds, in whatever order they come.
alter table fairlane.arrivals
    add column given text,
    add column given_by bigint;
alter table fairlane.jobs
    add column given text,
    add column given_by bigint,
    add column context text;
alter table fairlane.gates add column given_by bigint not null default 0;
alter table fairlane.flows
    add column given_by bigint not null default 0,
    add column given_at bigint not null default 0;
alter type fairlane.touched_gate add attribute given_by bigint;
comment on column fairlane.jobs.given is 'Numbers that every bell which rings for it brings along.';
comment on column fairlane.flows.given_at is 'When its weight was brought: it is kept for a time although the flow has no jobs.';
comment on column fairlane.jobs.context is 'What its producer told of it besides its arguments.';
