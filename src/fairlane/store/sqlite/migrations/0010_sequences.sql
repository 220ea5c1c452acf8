-- Jobs that run one after the other. One that will be tried again keeps its place until it is ready: bells say how many
-- ended claims keep theirs, and how many places are given back.
alter table jobs add column keeps_place integer not null default 0;
alter table releases add column kept integer not null default 0;
alter table arrivals add column resumed integer not null default 0;

-- Who keeps a place, for whoever counts them anew: they are few beside what waits.
create index jobs_keeping_place on jobs (queue, lane) where keeps_place = 1;
