-- Where an engine runs what was admitted, the time from admission to start is what an adaptive cap looks at.
alter type fairlane.settlement add attribute lag bigint;
alter table fairlane.releases add column signal bigint[];
comment on column fairlane.releases.signal is 'What adaptive caps look at, added up for the claims that ended: lag, or run time where there is none. Null: run time.';
