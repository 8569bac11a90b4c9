"""The command line: `python -m holdfast_testbed`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast_testbed.build.images import archive, build_all
from holdfast_testbed.cluster.addressing import node_number
from holdfast_testbed.cluster.cluster import Cluster, recorded_clusters, remove_cluster
from holdfast_testbed.cluster.controlplane import PARTS
from holdfast_testbed.constants import DEFAULT_CLUSTER, IMAGES, NODE_MONITOR_GRACE_SECONDS
from holdfast_testbed.errors import AlreadyUpError, NoSuchClusterError, TestbedError
from holdfast_testbed.fakes.metadata import AWS, CLOUDS
from holdfast_testbed.node.processes import alive
from holdfast_testbed.progress_output import say

_DAY = 24 * 3600


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the arguments. A failure is one message and status 1."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
    except TestbedError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast_testbed", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
        made.add_argument("--name", default=DEFAULT_CLUSTER, help="which cluster (default: %(default)s)")
        made.set_defaults(run=action)
        return made

    up = command("up", _up, "bring a cluster up")
    up.add_argument("--nodes", type=int, default=3, help="0 starts only the control plane (default: %(default)s)")
    up.add_argument(
        "--node-monitor-grace-seconds",
        type=_seconds,
        default=NODE_MONITOR_GRACE_SECONDS,
        help="silence after which a node counts as lost (default: %(default)s)",
    )
    up.add_argument("--no-images", action="store_true", help="load no images of Holdfast")
    down = command("down", _down, "remove a cluster and everything that it created")
    down.add_argument("--all", action="store_true", help="remove every cluster of this cache")
    command("status", _status, "show which parts of a cluster run")
    node = command("node", _node, "kill (power loss), cut (partition), heal (end of partition) or start a node")
    node.add_argument("what", choices=("kill", "cut", "heal", "start"))
    node.add_argument("node", help="1 or node-1")
    parts = ", ".join(PARTS)
    for name, action in (("pause", _pause), ("resume", _resume)):
        command(name, action, f"{name} a part").add_argument("part", help=f"{parts}, or node-1/kubelet")
    image = command("image", _image, "build images, or load them into the nodes as well")
    image.add_argument("what", choices=("build", "load"))
    image.add_argument("images", nargs="*", metavar="IMAGE", help=f"default: {' '.join(IMAGES)}")
    command("kubeconfig", _kubeconfig, "print the path of the administrator's kubeconfig")
    notice = command("notice", _notice, "announce on a node's metadata service that the cloud reclaims the node")
    notice.add_argument("node", help="1 or node-1")
    notice.add_argument("--cloud", choices=CLOUDS, help=f"the cloud of the node (default: {AWS})")
    notice.add_argument(
        "--action", help="the cloud's name of the event, for example Freeze (default: its spot notice)"
    )
    notice.add_argument("--seconds", type=_seconds, help="time until the event (default: the cloud's notice time)")
    notice.add_argument("--clear", action="store_true", help="withdraw the announcement")
    return parser


def _seconds(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= _DAY:
        raise argparse.ArgumentTypeError(f"invalid value '{text}': expected an integer from 1 to 86400")
    return int(text)


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _up(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    try:
        cluster = Cluster.up(
            name=options.name,
            nodes=options.nodes,
            node_monitor_grace_seconds=options.node_monitor_grace_seconds,
            images=not options.no_images,
        )
        say(f"cluster '{cluster.name}' is up after {time.monotonic() - begun:.0f} s")
    except AlreadyUpError as already:
        say(str(already))
        cluster = Cluster.load(options.name)
    _print(f"export KUBECONFIG={cluster.kubeconfig}")


def _down(options: argparse.Namespace) -> None:
    names = recorded_clusters() if options.all else [options.name]
    for name in names:
        try:
            remove_cluster(name)
            say(f"cluster '{name}' is gone")
        except NoSuchClusterError as nothing:
            say(f"{nothing}: nothing to remove")


def _status(options: argparse.Namespace) -> None:
    cluster = Cluster.load(options.name)
    plane = cluster.control_plane
    for part in PARTS:
        _print(f"{part:<26}{'runs' if alive(plane.identity(part)) else 'is gone'}")
    answers = plane.ready()
    ready = cluster.ready_nodes() if answers else []
    for number in range(1, cluster.nodes + 1):
        node = cluster.node(number)
        power = "has power" if node.alive() else "has no power"
        cable = "" if node.connected() else ", cable pulled"
        _print(f"{node.name:<26}{power}{cable}{', Ready' if node.name in ready else ', not Ready'}")
    _print(f"{'API server':<26}{'answers' if answers else 'does not answer'} at {cluster.state.server}")
    _print(f"{'kubeconfig':<26}{cluster.kubeconfig}")
    others = [name for name in recorded_clusters() if name != options.name]
    if others:
        _print(f"{'other clusters':<26}{', '.join(others)}")


def _node(options: argparse.Namespace) -> None:
    node = Cluster.load(options.name).node(node_number(options.node))
    {"kill": node.kill, "cut": node.cut, "heal": node.heal, "start": node.start}[options.what]()


def _pause(options: argparse.Namespace) -> None:
    Cluster.load(options.name).pause(options.part)


def _resume(options: argparse.Namespace) -> None:
    Cluster.load(options.name).resume(options.part)


def _image(options: argparse.Namespace) -> None:
    built: dict[str, Path] = {name: archive(name) for name in options.images} if options.images else build_all()
    for name, path in built.items():
        _print(f"{name:<12}{path}")
    if options.what == "load":
        Cluster.load(options.name).load_images()


def _kubeconfig(options: argparse.Namespace) -> None:
    _print(str(Cluster.load(options.name).kubeconfig))


def _notice(options: argparse.Namespace) -> None:
    cluster, number = Cluster.load(options.name), node_number(options.node)
    if options.clear:
        cluster.clear_notice(number, cloud=options.cloud)
    else:
        cluster.notice(number, cloud=options.cloud or AWS, action=options.action, seconds=options.seconds)


if __name__ == "__main__":
    sys.exit(main())
