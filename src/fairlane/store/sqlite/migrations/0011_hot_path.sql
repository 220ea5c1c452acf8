-- What one settlement releases in a queue is one row, lane by lane: `bells` is a JSON array of `scheduler.Release`s, each an
-- array whose first item is its lane in hexadecimal. A row for each lane cost three writes and a read of its own.
create table releases_together (
    id integer primary key,
    queue integer not null,
    count integer not null,
    bells text not null
) strict;

insert into releases_together (queue, count, bells)
select queue, count(*), json_group_array(
    json_array(lower(hex(lane)), ended, ran, charged, unstarted, refund, since, failed, neutral, latest, kept)
)
from (select * from releases order by id)
group by queue;

drop table releases;
alter table releases_together rename to releases;
create index releases_by_queue on releases (queue);

-- Raised with every write to the queue's flows, lanes and gates: a claimer that finds it as it left it knows them still.
alter table queues add column revision integer not null default 0;
