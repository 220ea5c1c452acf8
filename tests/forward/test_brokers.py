"""The brokers of these tests are real, keep what they hold over a kill, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pika
import pytest
import redis as redis_client

from tests.forward.brokers import ThrowawayBroker, ThrowawayRabbit, ThrowawayRedis

pytestmark = pytest.mark.xdist_group("brokers")  # one server of each for them all


def push_and_count(broker: ThrowawayBroker) -> int:
    """Put one message into the broker, safely, and count those that lie there."""
    if isinstance(broker, ThrowawayRedis):
        with redis_client.Redis.from_url(broker.url) as client:
            client.rpush("kept", "message")
            return int(client.llen("kept"))
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("kept", durable=True)
        channel.basic_publish("", "kept", b"message", pika.BasicProperties(delivery_mode=2), mandatory=True)
        return int(channel.queue_declare("kept", passive=True).method.message_count)


def open_files(pid: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(file))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [ThrowawayRedis, ThrowawayRabbit])
def test_a_broker_keeps_its_messages_over_a_restart_and_a_kill(make: Callable[[], ThrowawayBroker]) -> None:
    with make() as broker:
        url, pids = broker.url, [broker.pid]
        assert push_and_count(broker) == 1
        # The kill comes second: a RabbitMQ that is killed may forget a queue that was declared just before, though not
        # a message that it has confirmed.
        broker.restart()
        pids.append(broker.pid)
        assert push_and_count(broker) == 2
        broker.crash()
        pids.append(broker.pid)
        assert push_and_count(broker) == 3
        assert broker.url == url
        assert len(set(pids)) == 3
        folder = broker.folder
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a server is left behind"


def test_a_redis_that_is_not_durable_forgets() -> None:
    with ThrowawayRedis(durable=False) as broker:
        assert push_and_count(broker) == 1
        broker.restart()
        assert push_and_count(broker) == 1


def test_nobody_listens_while_a_broker_is_stopped() -> None:
    with ThrowawayRedis() as broker:
        broker.stop()
        with redis_client.Redis.from_url(broker.url) as client, pytest.raises(redis_client.ConnectionError):
            client.ping()
        broker.start()
        assert push_and_count(broker) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are looked up in /proc")
def test_a_server_listens_on_the_loopback_address_only(broker: ThrowawayBroker) -> None:
    sockets = open_files(broker.pid)
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().split("\n")[1:] if line]
    lines += [line.split() for line in Path("/proc/net/tcp6").read_text().split("\n")[1:] if line]
    listening = {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}
    assert listening, "the server listens nowhere"
    assert {address.partition(":")[0] for address in listening} == {"0100007F"}
