"""Cables and routes: a switch in its own namespace, one cable to the host and one to each node.

The bridge has its own namespace so that no packet filter of the host, such as Docker's, affects it.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from holdfast_testbed.build.commands import run
from holdfast_testbed.cluster.addressing import NodePlan, Plan
from holdfast_testbed.constants import POD_BRIDGE
from holdfast_testbed.errors import CommandFailedError, LeftBehindError, MissingProgramError

Made = TypeVar("Made")

_NETNS = Path("/run/netns")
_NOBODY = "02:00:00:00:00:01"
"""An Ethernet address that no interface has."""
_GATEWAY = "02:00:00:00:00:02"
"""The address of each node's bridge for pods.

A fixed address is stable. Without one, a bridge takes the lowest address of its cables, which may change with pods.
Pods that have cached the old one then reach nothing until they resolve it again.
"""
_CLONE_NEWNET = 0x40000000
_setns = ctypes.CDLL(None, use_errno=True).setns
_MODULES = ("overlay", "bridge", "br_netfilter", "veth", "nf_tables")


def ip(*words: str) -> str:
    return run(["ip", *words])


def batch(lines: Sequence[str], namespace: str = "") -> None:
    """Run many `ip` commands in one process."""
    run(["ip", *(["-n", namespace] if namespace else []), "-batch", "-"], stdin="\n".join(lines) + "\n")


def networks_in_use() -> list[str]:
    """Return all IPv4 networks for which the host has a route or an address."""
    routes = json.loads(ip("-4", "-j", "route", "show", "table", "all") or "[]")
    found = [route["dst"] for route in routes if route.get("dst", "default") != "default"]
    links = json.loads(ip("-4", "-j", "addr") or "[]")
    return found + [f"{a['local']}/{a['prefixlen']}" for link in links for a in link["addr_info"]]


def tags_in_use() -> set[str]:
    """Return the names of links and namespaces; those of clusters begin with `hf`."""
    links = {link["ifname"] for link in json.loads(ip("-j", "link") or "[]")}
    spaces = {path.name for path in _NETNS.iterdir()} if _NETNS.is_dir() else set()
    return {name.split("-")[0] for name in links | spaces}


def load_kernel_modules() -> None:
    """Load the kernel modules that nodes need. Most kernels have them built in, so a failure is no error yet."""
    for module in _MODULES:
        with suppress(CommandFailedError, MissingProgramError):
            run(["modprobe", "--quiet", module])


def make_switch(plan: Plan) -> None:
    """Create the switch and the host's cable to it."""
    load_kernel_modules()
    ip("netns", "add", plan.switch)
    peer = f"{plan.tag}s"
    batch([f"link add {plan.host_link} type veth peer name {peer}", f"link set {peer} netns {plan.switch}"])
    batch(
        ["link set lo up", "link add br0 type bridge", "link set br0 up", f"link set {peer} master br0 up"],
        namespace=plan.switch,
    )
    batch([f"addr add {plan.host_address}/24 dev {plan.host_link}", f"link set {plan.host_link} up"])


def make_node_network(plan: Plan, node: NodePlan, metadata_address: str) -> None:
    """Create a node's namespace with its cable, its routes to the pods of other nodes, and the metadata address."""
    ip("netns", "add", node.namespace)
    batch(
        [
            f"link add {node.link} type veth peer name eth0 netns {node.namespace}",
            f"link set {node.link} master br0 up",
        ],
        namespace=plan.switch,
    )
    others = [other for other in plan.nodes if other is not node]
    batch(
        [
            "link set lo up",
            f"link add {POD_BRIDGE} address {_GATEWAY} type bridge",
            f"addr add {node.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {plan.host_address}",
            f"addr add {metadata_address}/32 dev lo",
            *(f"route add {other.pod_network} via {other.address}" for other in others),
        ],
        namespace=node.namespace,
    )
    ip("route", "add", node.pod_network, "via", node.address, "dev", plan.host_link)


def set_cable(plan: Plan, node: NodePlan, *, up: bool) -> None:
    """Plug or unplug a node's cable."""
    ip("-n", plan.switch, "link", "set", node.link, "up" if up else "down")


def unplug_pods(node: NodePlan) -> None:
    """Remove the cables of pods that a node had before its power was cut.

    The kernel keeps the network of a dead pod for a minute and more, while its sockets time out. On the bridge it
    would answer for its address, which another pod gets after the boot.
    """
    for link in json.loads(ip("-n", node.namespace, "-j", "link", "show", "type", "veth", "master", POD_BRIDGE)):
        with suppress(CommandFailedError):  # it disappeared meanwhile
            ip("-n", node.namespace, "link", "delete", link["ifname"])


def hide(node: NodePlan, address: str, *, silent: bool) -> None:
    """Make an address (that of the metadata service) unreachable for a node.

    Requests get an error, or with `silent` no answer. They stay on the node's switch.
    """
    route = f"route add unreachable {address}/32"
    if silent:
        route = f"route add {address}/32 dev eth0"
        ip("-n", node.namespace, "neigh", "replace", address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
    batch([route, f"addr del {address}/32 dev lo"], namespace=node.namespace)


def show(node: NodePlan, address: str) -> None:
    """Restore the address, if it was hidden."""
    shown = json.loads(ip("-n", node.namespace, "-j", "route", "show", address))
    if shown:
        kind = "unreachable " if shown[0].get("type") == "unreachable" else ""
        batch([f"addr add {address}/32 dev lo", f"route del {kind}{address}/32"], namespace=node.namespace)


def inside(node: NodePlan, make: Callable[[], Made]) -> Made:
    """Run `make` in a node's network. Sockets that it creates stay there."""

    def made() -> Made:
        with Path(_NETNS, node.namespace).open() as space:
            if _setns(space.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {node.namespace}")
        return make()

    with ThreadPoolExecutor(max_workers=1) as pool:  # a separate thread, whose namespace ends with it
        return pool.submit(made).result()


def cable_is_up(plan: Plan, node: NodePlan) -> bool:
    """Return whether the node's cable is plugged in."""
    try:
        shown = json.loads(ip("-n", plan.switch, "-j", "link", "show", "dev", node.link))
    except CommandFailedError:
        return False
    return "UP" in shown[0]["flags"]


def remove(plan: Plan) -> None:
    """Remove the cluster's namespaces, its cable to the host, and with it every route."""
    if not plan.nodes:
        return
    if plan.host_link in {link["ifname"] for link in json.loads(ip("-j", "link") or "[]")}:
        ip("link", "delete", plan.host_link)
    for name in plan.namespaces:
        _remove_namespace(name)


def _remove_namespace(name: str) -> None:
    deadline = time.monotonic() + 10
    while (_NETNS / name).exists():
        try:
            ip("netns", "delete", name)
        except CommandFailedError as error:
            # A kill between the creation of the file and its mount left it, or a process still uses it for a moment.
            if time.monotonic() > deadline:
                raise LeftBehindError(f"cannot remove network namespace {name}: {error}") from error
            time.sleep(0.1)
