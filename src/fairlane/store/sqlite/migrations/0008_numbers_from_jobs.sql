-- Numbers that jobs bring along for their queue's policy, with the bell that rings when they join their lane for the first
-- time; and what their producers told of them besides. JSON; null as a rule.
alter table arrivals add column given text;
alter table jobs add column given text;
alter table jobs add column context text;
