"""Machines that are network namespaces of this one, on a network whose delay is set at will, and that can be cut.

Each namespace has a device whose packets a process of ours carries to the others (TUN), after so many seconds. That
needs root and /dev/net/tun, and no netem, which many kernels are built without.

As a program, it is that process: namespaces.py NAME .... It takes lines on stdin: `delay SECONDS`, `cut NUMBER`, `mend
NUMBER`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ENTRY", "Net", "address", "net", "ray_nodes", "why_not"]

TUN, TUNSETIFF, IFF_TUN, IFF_NO_PI = Path("/dev/net/tun"), 0x400454CA, 1, 0x1000
CLONE_NEWNET = 0x40000000
DEVICE = "moeflux0"
ENTRY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""What a process must have in its environment to be let into Ray there."""
MTU = 65000
CURRENT = Path("/tmp/ray/ray_current_cluster")


def why_not() -> str | None:
    """Why there are no such machines here; None if there are."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    if not TUN.exists() or shutil.which("ip") is None:
        return "needs /dev/net/tun and the command ip"
    tried = subprocess.run(["ip", "netns", "add", f"mfx{os.getpid()}"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"ip netns: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"mfx{os.getpid()}"], check=True)
    return None


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


class Net:
    def __init__(self, names: list[str], carrier: subprocess.Popen[str]) -> None:
        self.names, self._carrier = names, carrier

    def within(self, number: int, *command: object) -> list[str]:
        """A command of that machine."""
        return ["ip", "netns", "exec", self.names[number], *map(str, command)]

    def tell(self, line: str) -> None:
        """And waits until it holds."""
        assert self._carrier.stdin is not None and self._carrier.stdout is not None
        print(line, file=self._carrier.stdin, flush=True)
        assert self._carrier.stdout.readline() == "done\n"


@contextlib.contextmanager
def net(count: int) -> Iterator[Net]:
    """So many machines, each of which reaches the others at address(number). They know nothing of this machine."""
    names = [f"mfx{os.getpid()}-{number}" for number in range(count)]
    made: list[str] = []
    carrier = None
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            made.append(name)
        carrier = subprocess.Popen(
            [sys.executable, __file__, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert carrier.stdout is not None and carrier.stdout.readline() == "done\n"
        for number, name in enumerate(names):
            for words in (
                f"link set {DEVICE} mtu {MTU} up",
                f"addr add {address(number)}/24 dev {DEVICE}",
                "link set lo up",
            ):
                subprocess.run(["ip", "-n", name, *words.split()], check=True)
        yield Net(names, carrier)
    finally:
        if carrier is not None:
            with carrier:
                carrier.kill()
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextlib.contextmanager
def ray_nodes(machines: Net) -> Iterator[str]:
    """A node of Ray on each machine, by the commands of docs/cluster.md. Gives the address of the first."""
    head = f"{address(0)}:6379"
    started: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", **ENTRY}
    try:
        for number in range(len(machines.names)):
            first = ["--head", "--port=6379", "--include-dashboard=false", "--no-monitor"]
            where = first if number == 0 else [f"--address={head}"]
            command = [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block", "--num-cpus=0"),
                *("--include-log-monitor=false", f"--node-ip-address={address(number)}"),
                f"--object-store-memory={80 << 20}",
            ]
            node = subprocess.Popen(
                machines.within(number, *command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
            )
            started.append(node)
            assert node.stdout is not None
            told = []
            for line in node.stdout:
                told.append(line)
                if "Ray runtime started" in line:
                    break
            else:
                raise RuntimeError("".join(told))
            readers.append(threading.Thread(target=node.stdout.read, daemon=True))
            readers[-1].start()
        yield head
    finally:
        for name in machines.names:  # Ray itself takes long to end where the network is cut
            run = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
            for pid in run.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for node in started:
            with node:
                node.wait()
        for reader in readers:
            reader.join(10)
        with contextlib.suppress(OSError):  # where programs that name no cluster would look for this one
            if CURRENT.read_text().strip() == head:
                CURRENT.unlink()


# ---- The process that carries -----------------------------------------------------------------------------------


def device_of(name: str) -> int:
    """The end of a new device of that namespace."""
    with open(f"/var/run/netns/{name}") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def carry(names: list[str]) -> None:
    ends = [device_of(name) for name in names]
    numbers = {bytes(map(int, address(number).split("."))): number for number in range(len(names))}
    seconds, cut = 0.0, set[int]()
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    print("done", flush=True)
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, *ends], [], [], left)
        now = time.monotonic()
        for descriptor in ready:
            if descriptor == 0:
                word, _, value = os.read(0, 4096).decode().strip().partition(" ")
                if not word:
                    return
                if word == "delay":
                    seconds = float(value)
                else:
                    (cut.add if word == "cut" else cut.discard)(int(value))
                print("done", flush=True)
                continue
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(descriptor, 1 << 17)
                    to, here = numbers.get(packet[16:20]), ends.index(descriptor)
                    if to is not None and packet[0] >> 4 == 4 and not cut & {to, here}:
                        count += 1
                        heapq.heappush(waiting, (now + seconds, count, to, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError):  # a full device loses packets, as networks do
                os.write(ends[to], packet)


if __name__ == "__main__":
    carry(sys.argv[1:])
