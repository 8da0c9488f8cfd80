"""The command `pdctl`. A subcommand's work is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pdcluster.core.errors import ConfigError, PdclusterError
from pdcluster.core.messages import Role
from pdcluster.settings import flags
from pdcluster.settings.config import QUIET_GRPC, set_environment, set_library_environment, whole_pair
from pdcluster.settings.kinds import address as parse_address
from pdcluster.settings.kinds import duration
from pdcluster.settings.settings_table import SectionName, SettingPairs, SettingsFile, show_settings
from pdcluster.settings.surfaces import surface_names
from pdcluster.settings.tls_trust import TlsTrust
from pdcluster_router.operate.batch.flags import BatchFlags
from pdcluster_router.operate.printing import PrintFormat
from pdcluster_router.replay.options import NodeOptions, Printing, Routing, Scaling, Traffic

if TYPE_CHECKING:
    from pdcluster_router.operate.clients import AdminClients

HELP = """Operate a pdcluster; replay traces without one.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 not reached in time (wait, drain), 4 a router does not answer (what others
answered is printed), 5 a router wants another admin token."""
ANYWHERE = "The same as behind the command."
NOT_REACHED, UNREACHABLE, TOKEN_REFUSED, INTERRUPTED = 3, 4, 5, 130
ROLES = ("prefill", "decode", "mixed")
COMPLETION_S = 1.0
SHELLS = ("bash", "zsh", "fish")
PROGRAM, COMPLETE_VARIABLE = "pdctl", "_PDCTL_COMPLETE"

app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
get_app = typer.Typer(help="List nodes, requests, models or tenants, or show the policy.", no_args_is_help=True)
describe_app = typer.Typer(help="All that is known of one thing.", no_args_is_help=True)
set_app = typer.Typer(help="Change the routing policy.", no_args_is_help=True)
diff_app = typer.Typer(help="Compare the live policy with its shadow.", no_args_is_help=True)
adapter_app = typer.Typer(help="LoRA adapters of nodes that run vLLM.", no_args_is_help=True)
weights_app = typer.Typer(help="Weights of the model that nodes serve.", no_args_is_help=True)
batch_app = typer.Typer(help="Files of requests, below all interactive work.", no_args_is_help=True)
config_app = typer.Typer(help="Look at the settings.", no_args_is_help=True)
for name, part in (
    ("get", get_app), ("describe", describe_app), ("set", set_app), ("diff", diff_app), ("adapter", adapter_app),
    ("weights", weights_app), ("batch", batch_app),
    ("config", config_app),
):  # fmt: skip
    app.add_typer(part, name=name)


@app.callback()
def pdctl(
    admin: Annotated[str | None, typer.Option("--admin", metavar="HOST:PORT[,…]", help=ANYWHERE)] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help=ANYWHERE)] = None,
    ca: Annotated[Path | None, typer.Option("--ca", metavar="FILE", help=ANYWHERE)] = None,
    tls_name: Annotated[str | None, typer.Option("--tls-name", metavar="NAME", help=ANYWHERE)] = None,
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FORMAT", help=ANYWHERE)] = None,
) -> None:
    # The subcommand reads its own options after this, and takes what it was not given from the environment.
    given = {
        "PDCTL_ADMIN": admin, "PDCTL_TOKEN_FILE": token_file, "PDCTL_CA": ca, "PDCTL_TLS_NAME": tls_name,
        "PDCTL_OUTPUT": output,
    }  # fmt: skip
    set_library_environment(QUIET_GRPC)
    set_environment({name: str(value) for name, value in given.items() if value is not None})


# ---------------------------------------------------------------- options


def _names(ctx: typer.Context, incomplete: str, what: str) -> list[str]:
    """Names from the cluster, for a shell that completes. Nothing when no router answers in time."""
    from pdcluster_router.operate import reading

    given: dict[str, Any] = {field.name: ctx.params.get(field.name) for field in fields(AdminReach)}
    try:
        clients = AdminReach(**{**given, "admin": given["admin"] or ADMIN}).open(lambda line: None)
        names = reading.names(clients, what, COMPLETION_S)
    except PdclusterError:
        return []
    return _starting(names, incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [each for each in names if each.startswith(incomplete)]


def _node_names(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, "nodes")


def _request_names(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, "requests")


def _policy_names(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, "policies")


def _listed_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of what `get` lists."""
    return _names(ctx, incomplete, "requests" if str(ctx.info_name).startswith("request") else "nodes")


def _roles(incomplete: str) -> list[str]:
    return _starting(ROLES, incomplete)


def _seconds(given: object) -> float:
    """Seconds, as a number or with a unit."""
    try:
        return duration()(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _labels(given: Sequence[str]) -> dict[str, str]:
    """`-l key=value[,key=value]`, also several times."""
    found = {}
    for part in ",".join(given).split(",") if given else ():
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"-l {part!r} is no KEY=VALUE, such as -l role=decode")
        found[name.strip()] = value.strip().removeprefix("=")
    return found


LISTEN_HELP = "Where the page is. Beyond loopback it wants the token."
ADMIN, API = "127.0.0.1:50052", "127.0.0.1:8000"
Admin = Annotated[
    str,
    typer.Option(
        "--admin", envvar="PDCTL_ADMIN", metavar="HOST:PORT[,…]",
        help="Admin addresses of the routers; a name may stand for several.",
    ),
]  # fmt: skip
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", envvar="PDCTL_TOKEN_FILE", metavar="FILE", help="File with the admin token."),
]
CA_HELP = "Certificates that the routers' are signed by, in PEM: pdctl speaks TLS."
Ca = Annotated[Path | None, typer.Option("--ca", envvar="PDCTL_CA", metavar="FILE", help=CA_HELP)]
TLS_NAME_HELP = "What those are valid for, where it is not the host that is dialled."
TlsName = Annotated[str | None, typer.Option("--tls-name", envvar="PDCTL_TLS_NAME", metavar="NAME", help=TLS_NAME_HELP)]
Output = Annotated[
    PrintFormat, typer.Option("-o", "--output", envvar="PDCTL_OUTPUT", help="How the answer is printed.")
]
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Look again and again until Ctrl-C.")]
Interval = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")]
Timeout = Annotated[float, typer.Option("--timeout", parser=_seconds, metavar="TIME", help="Seconds, or 30s, 10m, 1h.")]
Labels = Annotated[
    list[str] | None, typer.Option("-l", "--selector", metavar="KEY=VALUE", help="Only rows with it, as role=decode.")
]
NodeName = Annotated[str, typer.Argument(metavar="NODE", autocompletion=_node_names)]
NodeNames = Annotated[list[str], typer.Argument(metavar="NODE…", autocompletion=_node_names)]
REQUEST_HELP = "The id of a request or choice, or the client's x-request-id."
RequestName = Annotated[str, typer.Argument(metavar="ID", autocompletion=_request_names, help=REQUEST_HELP)]
ListedNames = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME…]", autocompletion=_listed_names, help="Only these.")
]


@dataclass(frozen=True, slots=True)
class AdminReach:
    """Which routers a command asks, and how."""

    admin: Admin = ADMIN
    token_file: TokenFile = None
    ca: Ca = None
    tls_name: TlsName = None

    @property
    def trust(self) -> TlsTrust | None:
        return None if self.ca is None else TlsTrust(self.ca, self.tls_name)

    def open(self, warn: Callable[[str], None]) -> AdminClients:
        """Raises PdclusterError."""
        from pdcluster_router.operate.clients import AdminClients

        return AdminClients(self.admin, self.token_file, warn, self.trust)


LOCAL = AdminReach()


def _address(given: str) -> str:
    try:
        return parse_address(given)
    except ValueError as error:
        raise ConfigError(f"{given!r} {error}") from None


def _surfaces(given: str | None) -> tuple[str, ...]:
    try:
        return surface_names(given) if given is not None else ()
    except ValueError as error:
        raise ConfigError(f"--insecure is {given!r}, but {error}") from None


@contextmanager
def _reported() -> Iterator[None]:
    """Errors as one line, with pdctl's exit codes."""
    from pdcluster_router.operate.clients import NotReached, TokenRefused, Unreachable
    from pdcluster_router.operate.printing import print_any_text

    print_any_text()
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except PdclusterError as error:
        print(f"error: {error}", file=sys.stderr)
        codes = (
            (ConfigError, 2), (NotReached, NOT_REACHED), (TokenRefused, TOKEN_REFUSED), (Unreachable, UNREACHABLE),
        )  # fmt: skip
        raise typer.Exit(next((code for kind, code in codes if isinstance(error, kind)), 1)) from None


@contextmanager
def _clients(reach: AdminReach, *, needs_all: bool = True) -> Iterator[AdminClients]:
    """Open clients, and report errors. needs_all: that a router did not answer is one, once all is printed."""
    from pdcluster_router.operate.commands import warn

    with _reported():
        clients = reach.open(warn)
        try:
            yield clients
            if needs_all:
                clients.raise_silent()
        finally:
            clients.close()


# ---------------------------------------------------------------- reading


def _getter(what: str, help_text: str) -> None:
    def run(
        names: ListedNames = None,
        reach: AdminReach = LOCAL,
        output: Output = PrintFormat.TABLE,
        selector: Labels = None,
        watch: Watch = False,
        interval: Interval = 2.0,
    ) -> None:
        from pdcluster_router.operate import commands

        with _clients(reach) as clients:
            labels = _labels(selector or [])
            commands.repeat(
                lambda: commands.get(clients, what, output, names or [], labels), interval, is_watching=watch
            )

    get_app.command(what, help=help_text)(flags.grouped(run))
    get_app.command(what.removesuffix("s"), hidden=True)(flags.grouped(run))


_getter("nodes", "Nodes with their role, state and load.")
_getter("requests", "Requests that are not answered yet, oldest first.")
_getter("models", "Models and the nodes that serve them.")
_getter("tenants", "Requests and tokens of tenants since the routers' start.")


@get_app.command("policy")
@flags.grouped
def get_policy(reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE) -> None:
    """The routing policy of each router, and its shadow."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.get_policy(clients, output)


@describe_app.command("nodes", hidden=True)
@describe_app.command("node")
@flags.grouped
def describe_node(nodes: NodeNames, reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE) -> None:
    """Nodes with their load, transfer paths, requests and last events."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        for node in nodes:
            commands.describe(clients, node, output)


@describe_app.command("requests", hidden=True)
@describe_app.command("request")
@flags.grouped
def describe_request(request: RequestName, reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE) -> None:
    """Where an open request is, and why it went there."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.describe_request(clients, request, output)


@app.command()
@flags.grouped
def top(
    reach: AdminReach = LOCAL,
    output: Output = PrintFormat.TABLE,
    interval: Interval = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One look, since the routers' start.")] = False,
) -> None:
    """Pools, nodes, tokens a second and latencies, live. A node much slower than its pool is marked."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.show_top(clients, interval, output, is_once=once)


@app.command()
@flags.grouped
def status(reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE) -> None:
    """Whether the cluster serves, and what is wrong."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.status(clients, output)


@app.command()
@flags.grouped
def explain(request: RequestName, reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE) -> None:
    """Why a request went where it went."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.explain(clients, request, output)


@app.command()
@flags.grouped
def trace(request: RequestName, reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE) -> None:
    """The timeline of a request that ended: queue, prefill, KV transfer, decode."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.trace(clients, request, output)


@app.command()
@flags.grouped
def cache(
    reach: AdminReach = LOCAL,
    output: Output = PrintFormat.TABLE,
    digests: Annotated[bool, typer.Option("--digests", help="Also a digest of each node's blocks.")] = False,
) -> None:
    """What routers know of the nodes' prefix caches."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.cache(clients, output, digests=digests)


@app.command()
@flags.grouped
def events(
    reach: AdminReach = LOCAL,
    output: Output = PrintFormat.TABLE,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Also what happens from now on.")] = False,
    since: Annotated[int, typer.Option("--since", min=0, help="Only those after this number.")] = 0,
) -> None:
    """What happened: nodes that came and went, drains, roles, policies."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.events(clients, since, output, follow=follow)


@app.command()
@flags.grouped
def wait(
    reach: AdminReach = LOCAL,
    timeout: Timeout = 60.0,
    nodes: Annotated[int, typer.Option("--nodes", min=0, help="Also so many ready nodes.")] = 0,
) -> None:
    """Wait until every router would serve a request at once. Exit code 3 when that takes longer than --timeout."""
    from pdcluster_router.operate import commands

    with _reported():
        commands.wait(lambda: reach.open(lambda line: None), nodes, timeout)


# ---------------------------------------------------------------- changing


@app.command()
@flags.grouped
def cordon(nodes: NodeNames, reach: AdminReach = LOCAL) -> None:
    """Let nodes take no new work. What runs goes on."""
    from pdcluster_router.operate import changing

    with _clients(reach, needs_all=False) as clients:
        for node in nodes:
            print(changing.cordon(clients, node, cordoned=True))


@app.command()
@flags.grouped
def uncordon(nodes: NodeNames, reach: AdminReach = LOCAL) -> None:
    """Let nodes take work again."""
    from pdcluster_router.operate import changing

    with _clients(reach, needs_all=False) as clients:
        for node in nodes:
            print(changing.cordon(clients, node, cordoned=False))


@app.command()
@flags.grouped
def drain(
    nodes: NodeNames,
    reach: AdminReach = LOCAL,
    output: Output = PrintFormat.TABLE,
    timeout: Timeout = 600.0,
) -> None:
    """Cordon nodes and wait until nothing runs there. What still runs after --timeout moves to other nodes.

    Exit code 3 when a node is still at work then. Ctrl-C stops the wait; the nodes stay cordoned.
    """
    from pdcluster_router.operate import commands

    with _clients(reach, needs_all=False) as clients:
        commands.drain(clients, nodes, timeout, output)


@app.command("set-role")
@flags.grouped
def set_role(
    node: NodeName,
    role: Annotated[str, typer.Argument(metavar="prefill|decode|mixed", autocompletion=_roles)],
    reach: AdminReach = LOCAL,
) -> None:
    """Change what a node is scheduled for. What runs goes on."""
    from pdcluster_router.operate import changing

    with _clients(reach, needs_all=False) as clients:
        if role not in ROLES:
            raise ConfigError(f"{role!r} is no role; use {', '.join(ROLES)}")
        print(changing.set_role(clients, node, cast(Role, role)))


ADAPTER_NODES = typer.Option("--node", metavar="NODE", autocompletion=_node_names, help="Only there; may be repeated.")
AdapterName = Annotated[str, typer.Argument(metavar="NAME", help="What requests call it.")]


@adapter_app.command("load")
@flags.grouped
def load_adapter(
    name: AdapterName,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Its directory on the nodes' machines, absolute.")],
    node: Annotated[list[str] | None, ADAPTER_NODES] = None,
    reach: AdminReach = LOCAL,
) -> None:
    """Have all nodes load a LoRA adapter. Requests use its name as a model's."""
    from pdcluster_router.operate import changing

    with _clients(reach, needs_all=False) as clients:
        print(changing.load_adapter(clients, name, path, node or []))


@adapter_app.command("unload")
@flags.grouped
def unload_adapter(
    name: AdapterName,
    node: Annotated[list[str] | None, ADAPTER_NODES] = None,
    reach: AdminReach = LOCAL,
) -> None:
    """Have all nodes forget an adapter. What runs with it goes on."""
    from pdcluster_router.operate import changing

    with _clients(reach, needs_all=False) as clients:
        print(changing.unload_adapter(clients, name, node or []))


@adapter_app.command("list")
@flags.grouped
def list_adapters(reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE) -> None:
    """Adapters and the nodes that have them."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.list_adapters(clients, output)


FinishS = Annotated[
    float,
    typer.Option("--finish", metavar="SECONDS", help="Time for what runs to end; what is left moves to other nodes."),
]
WeightsSource = Annotated[
    str, typer.Argument(metavar="SOURCE", help="Directory or file on the nodes' machines, or ORG/NAME.")
]


@weights_app.command("load")
@flags.grouped
def load_weights(
    source: WeightsSource,
    label: Annotated[str, typer.Option("--label", metavar="LABEL", help="What requests and operators call them.")],
    reach: AdminReach = LOCAL,
    output: Output = PrintFormat.TABLE,
    max_unavailable: Annotated[
        int, typer.Option("--max-unavailable", min=0, help="Nodes that change at the same time; 0: all at once.")
    ] = 1,
    canary: Annotated[
        str | None,
        typer.Option("--canary", metavar="PERCENT", help="Load one node of each role, for so many of the requests."),
    ] = None,
    finish: FinishS = 600.0,
    release_first: Annotated[
        bool, typer.Option("--release-first", help="Nodes give their weights' memory back before they load.")
    ] = False,
) -> None:
    """Have nodes serve other weights of the model, node by node. Each loads beside what it serves, then goes over.

    Again with the same label, it goes on where a rollout stopped, or makes a canary the version of all nodes. Ctrl-C
    stops before the next node.
    """
    from pdcluster_router.operate import changing, commands

    with _clients(reach, needs_all=False) as clients:
        steps = changing.load_weights(
            clients, source, label, max_unavailable=max_unavailable, canary_percent=_percent(canary), finish_s=finish,
            releases_first=release_first,
        )  # fmt: skip
        commands.rollout(steps, output)


@weights_app.command("undo")
@flags.grouped
def undo_weights(reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE, finish: FinishS = 600.0) -> None:
    """Have the nodes of the newest weights serve what they served before."""
    from pdcluster_router.operate import changing, commands

    with _clients(reach, needs_all=False) as clients:
        commands.rollout(changing.undo_weights(clients, finish), output)


@weights_app.command("status")
@flags.grouped
def weights_status(reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE) -> None:
    """Which weights each node serves."""
    from pdcluster_router.operate import commands

    with _clients(reach, needs_all=False) as clients:
        commands.weights_status(clients, output)


@app.command()
@flags.grouped
def pause(
    reach: AdminReach = LOCAL,
    mode: Annotated[
        str, typer.Option("--mode", metavar="abort|wait|keep", help="What becomes of requests that run.")
    ] = "wait",
    timeout: Annotated[
        float, typer.Option("--max", metavar="SECONDS", help="The pause ends by itself after so long.")
    ] = 1800.0,
) -> None:
    """Hold new requests at the routers. Those that run end with what they have (abort), end (wait), or go on after the
    pause (keep), with the weights that are there then.
    """
    from pdcluster_router.operate import changing

    _check_mode(mode, changing.PAUSE_ENDS)
    with _clients(reach) as clients:
        print(changing.pause(clients, mode, timeout))


def _check_mode(mode: str, allowed: Iterable[str]) -> None:
    if mode not in allowed:
        raise typer.BadParameter(f"{mode!r} is none of {', '.join(allowed)}", param_hint="--mode")


@app.command()
@flags.grouped
def sleep(
    reach: AdminReach = LOCAL,
    mode: Annotated[
        str, typer.Option("--mode", metavar="abort|wait|keep", help="What becomes of requests that run.")
    ] = "wait",
    timeout: Annotated[
        float, typer.Option("--max", metavar="SECONDS", help="The pause ends by itself after so long; nodes sleep on.")
    ] = 1800.0,
) -> None:
    """Pause the routers, and have all nodes give the memory of weights and KV back to the system."""
    from pdcluster_router.operate import changing

    _check_mode(mode, changing.PAUSE_ENDS)
    with _clients(reach) as clients:
        print(changing.sleep(clients, mode, timeout))


@app.command()
@flags.grouped
def wake(reach: AdminReach = LOCAL) -> None:
    """Have nodes that sleep serve the weights that they had, and end the pause."""
    from pdcluster_router.operate import changing

    with _clients(reach) as clients:
        print(changing.wake(clients))


@app.command()
@flags.grouped
def resume(reach: AdminReach = LOCAL) -> None:
    """End a pause: what was held goes on."""
    from pdcluster_router.operate import changing

    with _clients(reach) as clients:
        print(changing.resume(clients))


def _percent(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        return float(given.removesuffix("%"))
    except ValueError:
        raise typer.BadParameter(f"{given!r} is no percentage, such as 10%") from None


@app.command()
@flags.grouped
def cancel(
    request: RequestName,
    reach: AdminReach = LOCAL,
    reason: Annotated[str, typer.Option("--reason", help="Told to the client.")] = "",
) -> None:
    """End a request on all nodes. Its client gets an error."""
    from pdcluster_router.operate import changing

    with _clients(reach) as clients:
        print(changing.cancel(clients, request, reason))


@set_app.command("policy")
@flags.grouped
def set_policy(
    reach: AdminReach = LOCAL,
    live: Annotated[
        str | None,
        typer.Option("--live", metavar="POLICY", autocompletion=_policy_names, help="Chooses from now on."),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option("--shadow", metavar="POLICY", autocompletion=_policy_names, help="Only watches; none removes it."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check it.")] = False,
) -> None:
    """Set the policy or its shadow at every router, such as --live kv-cost:weight=2."""
    from pdcluster_router.operate import changing

    with _clients(reach) as clients:
        print(changing.set_policy(clients, live, shadow, dry_run=dry_run))


@diff_app.command("policy")
@flags.grouped
def diff_policy(reach: AdminReach = LOCAL, output: Output = PrintFormat.TABLE) -> None:
    """How often the shadow policy agreed with the live one."""
    from pdcluster_router.operate import commands

    with _clients(reach) as clients:
        commands.diff_policy(clients, output)


@batch_app.command("run")
@flags.grouped
def run_batch(given: BatchFlags) -> None:
    """Answer the lines of an OpenAI batch file through routers, below all interactive work; a later run goes on.

    Exit code 1 where lines failed, which stand in the file of errors. Run it again to try those that may pass."""
    from pdcluster_router.operate.batch.run import run

    with _reported():
        if run(given.options()):
            raise typer.Exit(1)


# ---------------------------------------------------------------- without a cluster


@config_app.command("view")
def view(file: SettingsFile = None, pairs: SettingPairs = None, section: SectionName = None) -> None:
    """Print the effective value of every key and where it comes from."""
    with flags.reported():
        show_settings(file, pairs or [], section)


@config_app.command("check")
def check(file: SettingsFile = None, pairs: SettingPairs = None, section: SectionName = None) -> None:
    """Check the settings of this machine, and the files that they name; exit 2 with all that is wrong."""
    with flags.reported():
        from pdcluster.launch.config_check import problems

        show_settings(file, pairs or [], section, problems)


@app.command()
@flags.grouped
def console(
    listen: Annotated[
        str,
        typer.Option("--listen", metavar="HOST:PORT", help="Where the page is. Beyond loopback it wants the token."),
    ] = "127.0.0.1:8001",
    reach: AdminReach = LOCAL,
    api: Annotated[str, typer.Option("--api", metavar="HOST:PORT", help="A router's HTTP API, for chats.")] = API,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", metavar="NAME", help="A name by which browsers reach it.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="PEM file with the page's certificate.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key.")] = None,
    listen_fd: Annotated[int | None, typer.Option("--listen-fd", hidden=True)] = None,
    insecure: Annotated[
        str | None, typer.Option("--insecure", metavar="console", help="Let everybody read beyond loopback.")
    ] = None,
) -> None:
    """Serve a page that shows the cluster, until Ctrl-C. It changes things only with the admin token."""
    from pdcluster_router.console.serve import ConsoleOptions, run

    with _reported():
        tls = whole_pair("console", tls_cert, tls_key)
        names = tuple(hosts or ())
        places = _address(listen), reach.admin, reach.token_file, _address(api), names, listen_fd
        run(ConsoleOptions(*places, _surfaces(insecure), reach.trust, tls))


@app.command()
def completion(shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish")]) -> None:
    """Print the script that completes pdctl in a shell: eval "$(pdctl completion bash)"."""
    from typer._completion_shared import get_completion_script

    with _reported():
        if shell not in SHELLS:
            raise ConfigError(f"{shell!r} is no shell that is known; use {', '.join(SHELLS)}")
        print(get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, shell=shell))


@app.command()
@flags.grouped
def replay(traffic: Traffic, nodes: NodeOptions, routing: Routing, scaling: Scaling, printing: Printing) -> None:
    """Drive the production routing policies through a trace in simulated time; one row per policy. Needs no cluster.
    With --autoscale, pools grow and shrink under one policy; one row per rule.

    hit: share of prompt tokens that were cached where they were computed; hit_oracle: the same with one cache over the
    nodes that compute prompts for others, which a policy that also fetches from decode nodes, or computes there, can do
    better than. remote: share of requests by two nodes."""
    with flags.reported():
        from pdcluster_router.replay import command

        command.show(command.rows(traffic, nodes, routing, scaling), printing.output.value)


def main() -> None:
    from typer._completion_classes import completion_init

    completion_init()
    app(prog_name=PROGRAM)


if __name__ == "__main__":
    main()
