-- What a job declares for its death: follow-up jobs and values that land when it dies, in the same transaction
-- (`job.OnDead`, MessagePack). It stays for whoever is replayed and dies again.
alter table jobs add column on_dead blob;
