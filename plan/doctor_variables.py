"""The doctor's checks of what surrounds an NPU run: HCCL's ports and time-outs, variables that exclude each other.

Each check takes a machine.Machine and returns what it finds. Written from documentation, sources and issue trackers,
and tested with planted faults; not run on an NPU yet.
"""

from __future__ import annotations

import re

import environment
from plan.machine import Finding, Machine, fail, number_ranges, ok, warn

TIMEOUTS = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")

# ---------------------------------------------------------------------------------------------------- communication


def host_ports(machine: Machine) -> list[int] | None:
    """The ports that HCCL opens on the host; [] for "auto"; None when the variable cannot be read."""
    text = machine.env.get("HCCL_HOST_SOCKET_PORT_RANGE")
    if text is None:
        first = machine.number("HCCL_IF_BASE_PORT", 60000)
        return None if first is None else list(range(first, first + 32))
    if text == "auto":
        return []
    if not re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*", text):
        return None
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [port for end in ends for port in range(end[0], end[-1] + 1)]


def check_ports(machine: Machine) -> list[Finding]:
    """Nobody listens on HCCL's ports, and the system gives none of them to outgoing connections."""
    ports = host_ports(machine)
    if ports is None:
        todo = environment.advice("HCCL_HOST_SOCKET_PORT_RANGE")
        return [fail("HCCL ports", "HCCL_HOST_SOCKET_PORT_RANGE or HCCL_IF_BASE_PORT is no port", todo)]
    if not ports:
        return [ok("HCCL ports", "auto")]
    span = f"{ports[0]}-{ports[-1]}"
    if busy := [port for port in ports if not machine.port_is_free(port)]:
        todo = f"ss -ltnp 'sport = :{busy[0]}' shows whose; or export HCCL_HOST_SOCKET_PORT_RANGE=<50 free ports>"
        return [fail("HCCL ports", f"in use: {number_ranges(busy)} of {span} (EJ0003, EI0019)", todo)]
    outgoing = [int(port) for port in machine.text("proc/sys/net/ipv4/ip_local_port_range").split()]
    reserved = machine.text("proc/sys/net/ipv4/ip_local_reserved_ports").strip()
    kept = {port for part in reserved.split(",") if part for port in expand(part)}
    if outgoing and [port for port in ports if outgoing[0] <= port <= outgoing[1] and port not in kept]:
        todo = f"on the host: sysctl -w net.ipv4.ip_local_reserved_ports={span}"
        return [warn("HCCL ports", f"{span} are free, but the system may lend them to outgoing connections", todo)]
    return [ok("HCCL ports", f"{span} are free")]


def expand(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def check_timeouts(machine: Machine) -> list[Finding]:
    """The heartbeat speaks first, then HCCL, which names the peer; torch, which names nobody, comes last."""
    connect, execute = (machine.number(name, int(environment.when_unset(name))) for name in TIMEOUTS)
    set_connect, set_execute = map(environment.advice, TIMEOUTS)
    if connect is None or not 120 <= connect <= 7200:
        return [fail("time-outs", "HCCL_CONNECT_TIMEOUT is not in 120 to 7200 s", set_connect)]
    if execute is None or execute < 0:
        return [fail("time-outs", "HCCL_EXEC_TIMEOUT is not a number of seconds", set_execute)]
    findings = []
    if connect < 600:
        found = f"HCCL_CONNECT_TIMEOUT is {connect} s; ranks are further apart while they load (EI0006)"
        findings.append(warn("time-outs", found, set_connect))
    if execute == 0:
        findings.append(warn("time-outs", "HCCL_EXEC_TIMEOUT=0 waits for ever", set_execute))
    if machine.run is not None:
        torch, stall = machine.run.parallel.timeout_seconds, machine.run.train.stall_seconds
        if torch <= max(connect, execute):
            found = (
                f"parallel.timeout_seconds {torch} is not above HCCL's {max(connect, execute)} s, so torch ends the run"
            )
            todo = f"parallel.timeout_seconds={max(connect, execute) + 300}: HCCL's message names the peer"
            findings.append(warn("time-outs", found, todo))
        if stall >= torch:
            found = f"train.stall_seconds {stall} is not under parallel.timeout_seconds {torch}"
            findings.append(warn("time-outs", found, "train.stall_seconds=1200: a rank that stands still says where"))
    return findings or [ok("time-outs", f"HCCL_CONNECT_TIMEOUT {connect} s, HCCL_EXEC_TIMEOUT {execute} s")]


def check_expansion_mode(machine: Machine) -> Finding:
    mode = machine.env.get("HCCL_OP_EXPANSION_MODE", "")
    if mode == "AIV":
        if (machine.number("HCCL_EXEC_TIMEOUT", 0) or 0) > 1091:
            todo = "unset HCCL_OP_EXPANSION_MODE, or export HCCL_EXEC_TIMEOUT=1091"
            return fail("HCCL_OP_EXPANSION_MODE", "AIV allows HCCL_EXEC_TIMEOUT 1091 at most", todo)
        todo = "unset HCCL_OP_EXPANSION_MODE until a first run works"
        return warn("HCCL_OP_EXPANSION_MODE", "AIV has open defects on 910C (vllm-ascend #9873)", todo)
    return ok("HCCL_OP_EXPANSION_MODE", mode or "not set")


def check_determinism(machine: Machine) -> Finding:
    """device.set_environment sets all of them for train.deterministic; some of them alone are a mistake."""
    variables = environment.DETERMINISTIC["npu"]
    wrong = [f"{v.name}={v.value}" for v in variables if not v.allows(machine.env.get(v.name, ""))]
    if len(wrong) == len(variables):
        return ok("determinism", "not asked for: two runs may differ in the last bits")
    if wrong:
        return warn("determinism", "asked for in part only", f"export {' '.join(wrong)}")
    return ok("determinism", "asked for in HCCL, LCCL, products and ATB")


# -------------------------------------------------------------------------------- variables that exclude each other


def check_allocator(machine: Machine) -> Finding:
    names = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    given = {name: machine.env[name] for name in names if machine.env.get(name)}
    if len(given) == 2:
        todo = "unset PYTORCH_ALLOC_CONF"
        return fail("allocator", "PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set: torch_npu refuses", todo)
    expandable = [name for name, value in given.items() if "expandable_segments:true" in value.lower()]
    if expandable and machine.captures_graphs:
        found = "expandable_segments and vLLM's memory pools (graph capture, sleep mode) exclude each other"
        return fail("allocator", found, f"unset {expandable[0]}, or rollout.enforce_eager=true")
    if expandable and machine.samples_with_vllm:
        found = "expandable_segments: vLLM's sleep mode asserts that it is off"
        return warn("allocator", found, f"unset {expandable[0]} unless memory is fragmented")
    return ok("allocator", ", ".join(f"{name}={value}" for name, value in given.items()) or "torch_npu's own settings")


def check_task_queue(machine: Machine) -> Finding:
    value = machine.env.get("TASK_QUEUE_ENABLE", environment.when_unset("TASK_QUEUE_ENABLE"))
    if value == "2" and machine.captures_graphs:
        todo = "export TASK_QUEUE_ENABLE=1, or rollout.enforce_eager=true"
        return fail("TASK_QUEUE_ENABLE", "2 and graph capture (rollout.enforce_eager: false) exclude each other", todo)
    if machine.env.get("ASCEND_LAUNCH_BLOCKING") == "1":
        todo = "unset ASCEND_LAUNCH_BLOCKING"
        return warn("TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING=1 makes every launch wait: for debugging only", todo)
    return ok("TASK_QUEUE_ENABLE", value)


def check_vllm_variables(machine: Machine) -> list[Finding]:
    """What vllm_ascend.check_environment refuses: another launcher's variables, and options that move weights."""
    findings = []
    if names := environment.from_a_launcher(machine.env):
        found = f"{', '.join(names)} set: every rank would take itself for data-parallel rank 0 of its own"
        findings.append(fail("vLLM variables", found, f"unset {' '.join(names)}"))
    for variable in environment.switched_on(machine.env):
        found = f"{variable.name}={machine.env[variable.name]}: {variable.reason}"
        findings.append(fail("vLLM variables", found, f"export {variable.name}=0"))
    return findings or [ok("vLLM variables", "none that overrides the arguments")]


def check_jemalloc(machine: Machine) -> Finding:
    if "jemalloc" in machine.env.get("LD_PRELOAD", ""):
        return ok("jemalloc", machine.env["LD_PRELOAD"])
    todo = "apt-get install libjemalloc2; the run scripts preload it where it is installed"
    return warn("jemalloc", "not preloaded: host memory grows more", todo)


# check -> is it quick (no command, no library, no import)?
CHECKS = {
    check_ports: False,
    check_timeouts: True,
    check_expansion_mode: True,
    check_determinism: False,
    check_allocator: True,
    check_task_queue: True,
    check_vllm_variables: True,
    check_jemalloc: False,
}
