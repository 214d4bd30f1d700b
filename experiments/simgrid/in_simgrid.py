"""When the messages of a pattern have arrived, by SimGrid; runs under the Python that Debian's python3-simgrid is for.

    /usr/bin/python3 experiments/simgrid/in_simgrid.py [--cfg=SETTING ...] < PATTERN.json

Reads from standard input: num_hosts, bits_per_second, latency_seconds, and messages, each [source, target, bytes, delay
in seconds, positions of the messages that it waits for]. Prints a list of seconds, one a message. Messages inside a
host take no time. Needs only SimGrid and the standard library.
"""

import heapq
import json
import sys

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, this_actor


def build_platform(pattern):
    """Hosts on a star, each with a full-duplex link of the given rate; half of the latency at either end."""
    zone = NetZone.create_star_zone("cluster")
    for number in range(pattern["num_hosts"]):
        host = zone.create_host(str(number), 1e9)
        link = zone.create_split_duplex_link(f"link {number}", pattern["bits_per_second"] / 8)
        link.set_latency(pattern["latency_seconds"] / 2).seal()
        zone.add_route(host.netpoint, None, None, None, [LinkInRoute(link, LinkInRoute.Direction.UP)], True)
    zone.seal()


def send_all(engine, messages, arrivals):
    """One actor that starts each message when its time has come, and waits for whatever is next."""
    num_missing = [len(waits_for) for *_, waits_for in messages]
    waiting = [[] for _ in messages]
    due, under_way = [], []  # (seconds, message), (communication, message)
    for index, (_, _, _, delay, waits_for) in enumerate(messages):
        for before in waits_for:
            waiting[before].append(index)
        if not waits_for:
            heapq.heappush(due, (delay, index))

    def arrive(index):
        arrivals[index] = engine.clock
        for later in waiting[index]:
            num_missing[later] -= 1
            if not num_missing[later]:
                heapq.heappush(due, (engine.clock + messages[later][3], later))

    while due or under_way:
        while due and due[0][0] <= engine.clock:
            _, index = heapq.heappop(due)
            source, target, num_bytes, _, _ = messages[index]
            if source == target:
                arrive(index)
            else:
                hosts = (engine.host_by_name(str(host)) for host in (source, target))
                under_way.append((Comm.sendto_async(*hosts, round(num_bytes)), index))
        if not under_way:
            if due:
                this_actor.sleep_until(due[0][0])
            continue
        timeout = due[0][0] - engine.clock if due else -1.0
        if due and timeout <= 0:
            continue
        position = Comm.wait_any_for([comm for comm, _ in under_way], timeout)
        if position >= 0:
            arrive(under_way.pop(position)[1])


def main():
    pattern = json.load(sys.stdin)
    engine = Engine(sys.argv)
    build_platform(pattern)
    arrivals = [0.0] * len(pattern["messages"])
    Actor.create("sender", engine.host_by_name("0"), send_all, engine, pattern["messages"], arrivals)
    engine.run()
    print(json.dumps(arrivals))


if __name__ == "__main__":
    main()
