-- What a job declares for its death: follow-up jobs and values that land when it dies, in the same transaction. Written
-- once with the job; no index and no claim looks at it.

alter table fairlane.jobs add column on_dead bytea;
comment on column fairlane.jobs.on_dead is 'Effects for its death (`job.OnDead`, MessagePack); null: none. It stays for whoever is replayed and dies again.';
