-- Numbers that jobs bring along for their queue's policy, and what their producers told of them besides. JSON; null as a rule.
alter table fairlane.arrivals add column given text;
alter table fairlane.jobs
    add column given text,
    add column context text;
comment on column fairlane.jobs.given is 'Numbers that its bell brings along when it joins its lane for the first time.';
comment on column fairlane.jobs.context is 'What its producer told of it besides its arguments.';
