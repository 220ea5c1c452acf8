-- What limits keep besides a count and an instant, the bound that a job brought along, and what settlements say of the
-- runs that they end.
alter table gates add column memo text;
alter table gates add column value real;
alter table releases add column failed integer not null default 0;
alter table releases add column neutral integer not null default 0;
alter table releases add column latest integer not null default 0;
