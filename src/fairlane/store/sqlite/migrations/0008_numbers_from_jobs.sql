-- Numbers that jobs bring along for their queue's policy, with every bell that rings for them; and what their producers told
-- of them besides. JSON; null as a rule. `given_by` is the position that the job had at its enqueue: of two numbers for one
-- key, the one with the higher position holds, in whatever order they come.
alter table arrivals add column given text;
alter table arrivals add column given_by integer;
alter table jobs add column given text;
alter table jobs add column given_by integer;
alter table gates add column given_by integer not null default 0;
alter table flows add column given_by integer not null default 0;
-- When the weight was brought: it is kept for a time although its flow has no jobs.
alter table flows add column given_at integer not null default 0;
alter table jobs add column context text;
