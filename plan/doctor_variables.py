"""The doctor's checks of the environment of an NPU run: HCCL's ports and time-outs, and conflicting variables.

Each check takes a machine.Machine and returns its findings. The rules come from documentation, sources and issue
trackers. Tests plant faults; nothing here has been run on an NPU yet.
"""

import re

from inputs import environment
from plan.machine import Check, Finding, Machine, every, first, number_ranges

TIMEOUTS = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")

# ---------------------------------------------------------------------------------------------------- communication


def port_numbers(text: str) -> list[int]:
    """50000-50002,50010 -> [50000, 50001, 50002, 50010]"""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [port for first, _, last in ranges for port in range(int(first), int(last or first) + 1)]


def check_ports(machine: Machine) -> list[Finding]:
    """No process listens on HCCL's ports, and the system gives none of them to outgoing connections."""
    base = machine.number("HCCL_IF_BASE_PORT", 60000)
    text = machine.env.get("HCCL_HOST_SOCKET_PORT_RANGE", f"{base}-{base + 31}" if base else "")
    ports = port_numbers(text) if re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*", text) else []
    span = f"{ports[0]}-{ports[-1]}" if ports else text
    busy = [port for port in ports if not machine.port_is_free(port)]
    outgoing = port_numbers("-".join(machine.text("proc/sys/net/ipv4/ip_local_port_range").split()))
    reserved = port_numbers(machine.text("proc/sys/net/ipv4/ip_local_reserved_ports").strip())
    return first(
        "HCCL ports",
        f"{span} are free" if ports else text,
        (
            not ports and text != "auto",
            "fail",
            "HCCL_HOST_SOCKET_PORT_RANGE or HCCL_IF_BASE_PORT is no port",
            environment.advice("HCCL_HOST_SOCKET_PORT_RANGE"),
        ),
        (
            busy,
            "fail",
            f"in use: {number_ranges(busy)} of {span} (EJ0003, EI0019)",
            f"ss -ltnp 'sport = :{min(busy, default=0)}' shows whose; "
            "or export HCCL_HOST_SOCKET_PORT_RANGE=<50 free ports>",
        ),
        (
            set(ports) & set(outgoing) - set(reserved),
            "warn",
            f"{span} are free, but the system may lend them to outgoing connections",
            f"on the host: sysctl -w net.ipv4.ip_local_reserved_ports={span}",
        ),
    )


def check_network(machine: Machine) -> list[Finding]:
    """Address and interface are this machine's own, no table of another cluster is left, and the dies have addresses.

    HCCL takes HCCL_IF_IP before HCCL_SOCKET_IFNAME, whose names are beginnings (hiascend.com, HCCL_IF_IP).
    """
    there = {path.name for path in (machine.root / "sys/class/net").glob("*")}
    address, nodes = machine.env.get("HCCL_IF_IP", ""), machine.number("NODES", 1) or 1
    wanted = {name: machine.env.get(name, "") for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")}
    absent = []
    for variable, text in wanted.items():
        names, whole = text.lstrip("=").split(","), text.startswith("=") or variable.startswith("GLOO")
        if text and not text.startswith("^"):
            found = [one for one in there for name in names if one == name or (not whole and one.startswith(name))]
            absent += [f"{variable}={text}"] * (not found)
    has = f"this machine has {', '.join(sorted(there - {'lo'})) or 'no interface'}"
    return every(
        "network",
        f"HCCL_IF_IP {address or 'not set'}, {nodes} machine{'s' * (nodes > 1)}",
        (
            machine.env.get("RANK_TABLE_FILE"),
            "fail",
            "RANK_TABLE_FILE is set: HCCL would take the ranks of that file, perhaps of another cluster",
            "unset RANK_TABLE_FILE",
        ),
        (
            address and not machine.is_own_address(address),
            "fail",
            f"HCCL_IF_IP={address} is no address of this machine",
            "ADDRESS=<this machine's own> bash run_2node.sh, or unset HCCL_IF_IP",
        ),
        (absent, "fail", f"{', '.join(absent)}: {has}", "INTERFACE=<its own name on each machine>"),
        (
            nodes > 1 and not (machine.root / "etc/hccn.conf").exists(),
            "warn",
            "/etc/hccn.conf is missing, which has the addresses of the dies",
            "docker run ... -v /etc/hccn.conf:/etc/hccn.conf",
        ),
    )


def check_timeouts(machine: Machine) -> list[Finding]:
    """The time-outs must end in this order: the heartbeat, then HCCL, whose message names the peer, then torch."""
    connect, execute = (machine.number(name, int(environment.when_unset(name))) for name in TIMEOUTS)
    set_connect, set_execute = map(environment.advice, TIMEOUTS)
    unusable = (
        (
            connect is None or not 120 <= connect <= 7200,
            "fail",
            "HCCL_CONNECT_TIMEOUT is not in 120 to 7200 s",
            set_connect,
        ),
        (execute is None or execute < 0, "fail", "HCCL_EXEC_TIMEOUT is not a number of seconds", set_execute),
    )
    if any(row[0] for row in unusable):
        return first("time-outs", "", *unusable)
    rows = [
        (
            connect < 600,
            "warn",
            f"HCCL_CONNECT_TIMEOUT is {connect} s; ranks are further apart while they load (EI0006)",
            set_connect,
        ),
        (execute == 0, "warn", "HCCL_EXEC_TIMEOUT=0 waits for ever", set_execute),
    ]
    if machine.run is not None:
        torch, stall = machine.run.parallel.timeout_seconds, machine.run.train.stall_seconds
        hccl = max(connect, execute)
        rows += [
            (
                torch <= hccl,
                "warn",
                f"parallel.timeout_seconds {torch} is not above HCCL's {hccl} s, so torch ends the run",
                f"parallel.timeout_seconds={hccl + 300}: HCCL's message names the peer",
            ),
            (
                stall >= torch,
                "warn",
                f"train.stall_seconds {stall} is not under parallel.timeout_seconds {torch}",
                "train.stall_seconds=1200: a rank that hangs reports where",
            ),
        ]
    return every("time-outs", f"HCCL_CONNECT_TIMEOUT {connect} s, HCCL_EXEC_TIMEOUT {execute} s", *rows)


def check_expansion_mode(machine: Machine) -> list[Finding]:
    mode = machine.env.get("HCCL_OP_EXPANSION_MODE", "")
    return first(
        "HCCL_OP_EXPANSION_MODE",
        mode or "not set",
        (
            mode == "AIV" and (machine.number("HCCL_EXEC_TIMEOUT", 0) or 0) > 1091,
            "fail",
            "AIV allows HCCL_EXEC_TIMEOUT 1091 at most",
            "unset HCCL_OP_EXPANSION_MODE, or export HCCL_EXEC_TIMEOUT=1091",
        ),
        (
            mode == "AIV",
            "warn",
            "AIV has open defects on 910C (vllm-ascend #9873)",
            "unset HCCL_OP_EXPANSION_MODE until a first run works",
        ),
    )


# -------------------------------------------------------------------------------------------- conflicting variables


def check_allocator(machine: Machine) -> list[Finding]:
    given = {
        name: machine.env[name] for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if machine.env.get(name)
    }
    expandable = [name for name, value in given.items() if "expandable_segments:true" in value.lower()]
    unset = f"unset {' '.join(expandable)}"
    return first(
        "allocator",
        ", ".join(f"{name}={value}" for name, value in given.items()) or "torch_npu's own settings",
        (
            len(given) == 2,
            "fail",
            "PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set: torch_npu refuses",
            "unset PYTORCH_ALLOC_CONF",
        ),
        (
            expandable and machine.captures_graphs,
            "fail",
            "expandable_segments and vLLM's memory pools (graph capture, sleep mode) exclude each other",
            f"{unset}, or rollout.enforce_eager=true",
        ),
        (
            expandable and machine.samples_with_vllm,
            "warn",
            "expandable_segments: vLLM's sleep mode asserts that it is off",
            f"{unset} unless memory is fragmented",
        ),
    )


def check_task_queue(machine: Machine) -> list[Finding]:
    value = machine.env.get("TASK_QUEUE_ENABLE", environment.when_unset("TASK_QUEUE_ENABLE"))
    return first(
        "TASK_QUEUE_ENABLE",
        value,
        (
            value == "2" and machine.captures_graphs,
            "fail",
            "2 and graph capture (rollout.enforce_eager: false) exclude each other",
            "export TASK_QUEUE_ENABLE=1, or rollout.enforce_eager=true",
        ),
        (
            machine.env.get("ASCEND_LAUNCH_BLOCKING") == "1",
            "warn",
            "ASCEND_LAUNCH_BLOCKING=1 makes every launch wait: for debugging only",
            "unset ASCEND_LAUNCH_BLOCKING",
        ),
    )


def check_vllm_variables(machine: Machine) -> list[Finding]:
    """The engine refuses the same variables: those of another launcher, and options that move weights."""
    names = environment.from_a_launcher(machine.env)
    return every(
        "vLLM variables",
        "none that overrides the arguments",
        *(
            (True, "fail", f"{v.name}={machine.env[v.name]}: {v.reason}", f"export {v.name}=0")
            for v in environment.switched_on(machine.env)
        ),
        (
            names,
            "fail",
            f"{', '.join(names)} set: every rank would act as data-parallel rank 0 of an engine of its own",
            f"unset {' '.join(names)}",
        ),
    )


def check_jemalloc(machine: Machine) -> list[Finding]:
    preloaded = machine.env.get("LD_PRELOAD", "")
    return first(
        "jemalloc",
        preloaded,
        (
            "jemalloc" not in preloaded,
            "warn",
            "not preloaded: host memory grows more",
            "apt-get install libjemalloc2; the run scripts preload it where it is installed",
        ),
    )


CHECKS: tuple[Check, ...] = (
    check_ports,
    check_network,
    check_timeouts,
    check_expansion_mode,
    check_allocator,
    check_task_queue,
    check_vllm_variables,
    check_jemalloc,
)
QUICK = (check_network, check_timeouts, check_expansion_mode, check_allocator, check_task_queue, check_vllm_variables)
