"""A denial explained: what it means, the question that ``policy why`` would ask, and the lines that would allow it.

A denial's words may come from an agent: a target that cannot be read as a question is shown and asked nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from policy import data, denials, errors
from policy.denials import Denial
from policy.grants.sets import addresses, hostnames
from policy.grants.sets.access import PROTOCOLS, Protocol
from policy.manifest import text
from policy.manifest.permissions import CALLS
from policy.manifest.tools import command
from policy.why import files, kernel, limit, services, tools
from policy.why.ask import Answer, Question, Sight, ask

HTTPS: Final = 443
# What each layer's codes mean, for people. A gate of another version may say more than stands here.
MEANINGS: Final[Mapping[tuple[str, str], str]] = {
    ("dns", "name_not_granted"): "no grant covers this name, so it was not resolved and the answer was NXDOMAIN",
    ("dns", "rebinding"): "the name was answered with an address that no name may lead to, such as a private one",
    ("dns", "type_refused"): "only A, AAAA and HTTPS are asked for an agent",
    ("dns", "rate"): "more questions waited than the gate queues, so this one was not answered",
    ("dns", "set_full"): "the name had led to more addresses than its set holds",
    ("dns", "upstream"): "no resolver answered; nothing that is granted was refused",
    ("dns", "malformed"): "what was sent to the resolver is no question that it takes",
    ("sni", "sni_not_granted"): "the ClientHello names another server than a grant",
    ("sni", "no_sni"): "the ClientHello names no server, so there is nothing to compare with a grant",
    ("sni", "not_tls"): "what was sent is not TLS, and the grant is for TLS",
    ("sni", "ech_present"): "the ClientHello hides the server that it wants (ECH), so it cannot be compared",
    ("sni", "hello_too_long"): "the ClientHello is over 16 KiB",
    ("sni", "hello_timeout"): "no whole ClientHello came in time",
    ("sni", "malformed"): "the ClientHello cannot be read",
    ("sni", "not_redirected"): "the gate was called directly, which no grant allows",
    ("sni", "connections_wait"): "there were more connections at once than the gate carries; the others waited",
    ("sni", "connect_refused"): "the host is granted, and its server refused the connection",
    ("sni", "connect_unreachable"): "the host is granted, and no route leads to any of its addresses",
    ("sni", "connect_timeout"): "the host is granted, and none of its addresses answered in time",
    ("sni", "proxy_unreachable"): "the host is granted, and the proxy of config.toml ([proxy] url) does not answer",
    ("sni", "proxy_timeout"): "the host is granted, and the proxy of config.toml did not answer in time",
    ("sni", "proxy_certificate"): "the host is granted, and the certificate of the proxy is not believed ([tls] ca)",
    ("sni", "proxy_auth"): "the host is granted, and the proxy of config.toml refuses the credentials ([proxy] secret)",
    ("sni", "proxy_refused"): "the host is granted, and the proxy of config.toml refused the connection",
    (
        "sni",
        "proxy_malformed",
    ): "the host is granted, and [proxy] url of config.toml leads to a server that is no proxy",
    ("sni", "proxy_itself"): "the destination is an address of this host or of its proxy, which no agent reaches",
    ("sni", "answer_timeout"): "the host is granted, and its server did not answer the ClientHello in time",
    ("sni", "idle"): "the connection carried no byte for `connection_idle_seconds` of config.toml, and was ended",
    ("packet", denials.NOT_GRANTED): "no grant covers this destination, so the connection was refused",
    ("packet", "gateway"): "this is the gateway itself, which has no doors but its gates",
    ("packet", "protocol"): "grants are for tcp, tls and udp; no other protocol can be granted",
    ("syscall", denials.NOT_GRANTED): "the filter answered EPERM, as to every call that is not granted",
    ("syscall", denials.ARGUMENTS): "the filter answered EPERM: the call is granted, and not with these arguments",
    ("path", denials.NOT_GRANTED): "the path is not in the agent's root",
    ("path", denials.READ_ONLY): "the path is in the agent's root, and not to be written",
    ("exec", denials.NOT_GRANTED): "it is no program that is granted, or none is, so it cannot be started",
    ("pids", denials.TOO_MANY): "there were as many processes and threads as the agent may have",
    ("pids", denials.HOST_TASKS): "the sandbox had all the tasks of its cgroup, and may have ended by it",
    ("disk", denials.FULL): "the agent's scratch space, or the most that one file may have, was used up",
    ("credential", denials.NOT_GRANTED): "no grant names this secret",
    ("credential", "absent"): "the secret is granted, and the vault has none of this agent by that name",
    ("credential", "token"): "it was asked for without this run's token, or for the token a second time",
    ("credential", "expired"): "the run's deadline had passed, and the token with it",
    ("credential", "revoked"): "the run was being ended for a revocation",
    ("credential", "unavailable"): "the vault could not be opened, or did not answer",
    ("credential", "malformed"): "what was asked for can be no secret's name",
    ("credential", "rate"): "there were more requests than a run may make",
    ("model", "model_not_granted"): "no grant names this model of a provider that answers in this API",
    ("model", "search_not_granted"): "no provider of searches is granted",
    ("model", "host_not_granted"): "no grant of services.fetch names this host",
    ("model", "agent_not_granted"): "no grant of services.agents names this agent",
    ("model", "signal_not_granted"): "services.telemetry does not name this signal",
    ("model", "address_refused"): "the name leads to an address that is not public",
    ("model", "limit"): "a limit of the services was reached",
    ("model", "path_refused"): "the service gate knows no such operation",
    ("model", "host_refused"): "the request names another host than the service gate",
    ("model", "frame_refused"): "the request could be read in two ways, or asks for another protocol",
    ("model", "malformed"): "the request is no document of its API",
    ("model", "field_refused"): "the request has a field that is not passed on",
    ("model", "content_refused"): "the provider was asked to fetch, to keep or to run something",
    ("model", "tool_left_out"): "the tool runs at the provider; the request was passed on without it",
    ("model", "provider_failed"): "a provider did not answer, or answered what is not passed back",
    ("model", "no_provider"): "no provider of this model answered",
    ("model", "key_refused"): "the provider refused the operator's key",
    ("dns", "not_approved"): 'the name has on_deny = "ask", and no operator granted it',
    ("sni", "not_approved"): 'the name has on_deny = "ask", and no lease covers this connection',
    ("inject", "request_not_granted"): "no entry of the host has this method and path together in its inject",
    ("inject", denials.NOT_APPROVED): "an operator is asked about the request, and none granted it",
    ("inject", "lease_ended"): "the lease under which the request was sent has ended",
    ("inject", "not_held"): "the body is longer than what an operator can be asked about, or has no length",
    ("inject", "path_refused"): "the path could be read as another one, such as one with `..` or an encoded slash",
    ("inject", "host_refused"): "the request names another host than its connection",
    ("inject", "frame_refused"): "the request could be read in two ways, or asks for another protocol",
    ("inject", "limit"): "there were more requests with a secret than a run may make in a second",
    ("inject", "secret_absent"): "the vault has no such secret of this agent, or the run is being ended",
    ("inject", "secret_taken"): "the secret was taken out of the vault while the request was under way",
    ("inject", "secret_malformed"): "the secret is shorter than 8 bytes, or holds a character that no header may",
    ("inject", "host_failed"): "the host did not answer, or showed a certificate that the operator does not trust",
    ("inject", "answer_refused"): "the host answered in an encoding in which no secret can be looked for",
    ("inject", "handshake_failed"): "the agent's program did not take the certificate of the run's authority",
    ("ssh", "host_not_granted"): "the session is bound to a host whose key is not named",
    (
        "ssh",
        "key_not_granted",
    ): "no key that is granted at this host is the one of the request, or the vault has it not",
    ("ssh", "not_bound"): "a signature was asked for before the session was bound to a host",
    ("ssh", "forwarded"): "the session is one that a host has forwarded",
    ("ssh", "binding_refused"): "the host's signature over the session is not good, or the connection had a session",
    ("ssh", "not_a_login"): "a signature was asked for over data that are no login by a public key",
    ("ssh", "session_refused"): "the login is for another session or host than the bound one",
    ("ssh", "algorithm_refused"): "the login names another key or algorithm, or asks for SHA-1",
    ("ssh", "request_refused"): "the service lists keys and signs logins, and does nothing else",
    ("ssh", "malformed"): "the message is none of the agent protocol",
    ("ssh", "limit"): "there were more requests or connections than a run may have",
    ("ssh", "unavailable"): "the key could not be read from the vault, or the run is being ended",
    ("tool", denials.NOT_GRANTED): "the tool, or its class of side effect, is not granted",
    ("tool", denials.ARGUMENTS): "an argument of the call is not what a rule of the manifest takes",
    ("tool", denials.NOT_APPROVED): "an operator is asked about each call of the tool, and none granted this one",
    ("tool", "unknown_tool"): "tools.json has no such tool",
    ("tool", "class_not_allowed"): "allowed_side_effects of tools.json leaves out the class of the tool",
    ("tool", "not_offered"): "the tool is the daemon's, which did not start this run, or whose caller may not use it",
    ("tool", "schema"): "the arguments do not fit the tool's input schema",
    ("tool", "timeout_ms"): "the tool gave no answer within its own timeout_ms",
    ("tool", "drift"): "the server advertises something else than tools.json declares",
    ("tool", "calls"): "the run has made as many calls as the manifest allows one",
    ("tool", "calls_per_minute"): "there were as many calls in a minute as the manifest allows",
    ("tool", "call_ms"): "the tool gave no answer in the time that the manifest gives a call",
    ("tool", "argument_bytes"): "the arguments of the call were larger than the manifest allows",
    ("tool", "answer_bytes"): "the answer of the tool was larger than the manifest allows",
    ("tool", "too_many_requests"): "as many commands ran at one time, or were called in a second, as may be",
    ("spawn", "package_invalid"): "no package of that agent is where children are looked for, or it cannot be read",
    ("memory", "out_of_memory"): "the kernel ended the agent for its memory",
    ("time", "deadline"): "the agent was still running when this clock had run out",
    ("time", "cpu_time"): "the agent had used up its processor time",
}
# A clock that stands in no manifest, and what to do about it.
_CLOCKS: Final[Mapping[str, str]] = {
    "timeout": "give `covenant run` a longer --timeout",
    "parent": "the parent's own run had ended",
    "expires_at": "the envelope had expired: sign again",
}
_ASKED: Final = (
    "an operator is asked where config.toml of the supervisor has ask_operators = true (default: false, denied at "
    "once), and never by `covenant dev`; an entry without on_deny grants the host"
)
_BY_NAME: Final = "where the agent came by a name, grant the name: an address may be another's tomorrow"
# What to do about a denial of this layer and code.
_NOTES: Final[Mapping[tuple[str, str], str]] = {
    ("packet", denials.NOT_GRANTED): _BY_NAME,
    ("spawn", "package_invalid"): "put it beside its parent's package, or into a directory of `agents` in config.toml",
    ("credential", "absent"): "an operator puts it there: covenant vault put AGENT NAME",
    (
        "dns",
        "name_not_granted",
    ): f"written for HTTPS: another use has other ports, and protocol {' or '.join(PROTOCOLS)}",
    ("dns", "rebinding"): "grant the address itself where that is meant: host = ADDRESS",
}
_REPLACES: Final = (
    "a list of destinations takes the place of what the mode grants by itself: list every host that the agent uses"
)
# What to do about a call that belongs to a grant which is not there.
_FAMILIES: Final[Mapping[str, str]] = {
    "network": "the network is off: `covenant policy why PACKAGE --connect HOST:PORT` names the lines of a "
    "destination; for unix sockets alone, allow socket, connect and what else the agent calls in permissions.syscalls",
    "executables": "it starts a program, and none is granted: `covenant policy why PACKAGE --exec PATH` names the "
    "lines of one",
}
# `HOST:PORT/PROTOCOL` or `[ADDRESS]:PORT/PROTOCOL`, the latter two as far as they are known.
_HOST_PORT = re.compile(
    r"(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^\[\]:/]*))(?::(?P<port>[0-9]{1,5}))?(?:/(?P<protocol>[a-z0-9-]*))?"
)


# `METHOD https://HOST/PATH: words`
_REQUEST = re.compile(r"(?P<method>[A-Z-]{1,32}) https://(?P<host>[a-z0-9.-]+)(?P<path>/[!-9;-~]*): ")


class Explanation(Struct, frozen=True):
    """``answer`` is what ``policy why`` says of it today, None where no question can be asked; ``note`` what else
    helps, or why no line would."""

    denial: Denial
    meaning: str
    answer: Answer | None
    note: str

    @property
    def add(self) -> tuple[str, ...]:
        """The lines of agent.toml that would allow it."""
        return () if self.answer is None else self.answer.add

    def document(self) -> dict[str, Any]:
        """As ``covenant denials --json`` prints it."""
        return {
            **words(self.denial),
            "meaning": self.meaning,
            "why": None if self.answer is None else self.answer.document(),
            "add": list(self.add),
            "note": self.note or None,
        }


def words(denial: Denial) -> dict[str, Any]:
    """The denial itself as JSON."""
    return {
        "denial": denial.id,
        "layer": denial.layer,
        "target": denial.target,
        "code": denial.code,
        "grant": denial.grant,
    }


def meaning(denial: Denial) -> str:
    """Return the meaning of the denial, in a sentence."""
    who = denials.LAYERS.get(denial.layer, "something that serves the run")
    if denial.code == denials.REST_CODE:
        return f"{who} refused more than is listed one by one"
    return MEANINGS.get((denial.layer, denial.code), f"{who} refused it: {denial.code}")


def explain(denial: Denial, sight: Sight) -> Explanation:
    """The meaning of a denial, and the change that an author or an operator can make."""
    family = _family(denial, sight)
    question = None if denial.grant is None or family else question_of(denial, sight)
    answer = None
    if question is not None:
        try:
            answer = ask(question, sight)
        except errors.CovenantError:
            # The denial names an object that cannot exist; its layer refused it for other reasons.
            question = None
    if denial.layer == "inject" and denial.code != denials.REST_CODE:
        return Explanation(denial, meaning(denial), answer, _inject_note(denial))
    if denial.layer == "ssh" and denial.code != denials.REST_CODE:
        return Explanation(denial, meaning(denial), answer, _ssh_note(denial))
    return Explanation(denial, meaning(denial), answer, _FAMILIES[family] if family else _note(denial, answer, sight))


def _family(denial: Denial, sight: Sight) -> str:
    """Return the addition that a refused call belongs to, where the call by itself would be of no use; else nothing.

    A granted `socket` without a network makes no socket to connect, and `vfork` without a program nothing to start:
    the next call would be refused in its place.
    """
    if denial.code != denials.NOT_GRANTED or denial.layer not in ("syscall", "exec"):
        return ""
    found, additions = sight.found, data.additions()
    is_call = denial.layer == "syscall"
    if is_call and not found.reached.linked and denial.target in additions["network"].names:
        return "network"
    starts = denial.target == denials.EXECVE or (is_call and denial.target in additions["executables"].names)
    return "executables" if starts and not found.grants.executables else ""


def question_of(denial: Denial, sight: Sight) -> Question | None:
    """Return the question of ``policy why`` about it; None where there is no such question."""
    ask_of = _QUESTIONS.get(denial.layer)
    try:
        return None if ask_of is None else ask_of(denial, sight)
    except errors.CovenantError:
        return None


def of_question(question: Question, sight: Sight) -> Denial | None:
    """The denial that meets an agent which does what was asked and may not; None where it cannot be told beforehand.

    A name that a grant covers is answered, and what it leads to is not known before.
    """
    if not isinstance(question, kernel.Connect) or not sight.found.reached.linked:
        return None
    found = addresses.parse(question.host)
    if found is None:
        is_resolved = bool(sight.found.grants.network.to_name(question.host))
        return None if is_resolved else Denial("dns", question.host.lower(), "name_not_granted")
    host = str(next(addresses.blocks(*found)).network_address)
    shown = f"[{host}]" if ":" in host else host
    protocol = "udp" if question.protocol == "udp" else "tcp"
    return Denial("packet", f"{shown}:{question.port}/{protocol}", denials.NOT_GRANTED)


def _of_name(denial: Denial, sight: Sight) -> Question:
    return kernel.Connect(denial.target.rstrip(".").lower(), HTTPS, "tls")


def _of_hello(denial: Denial, sight: Sight) -> Question | None:
    found = _HOST_PORT.fullmatch(denial.target)
    if found is None or found["port"] is None:
        return None
    # A connection that is not TLS, or hides its server, passes where a grant does not look into it.
    by: Protocol = "tls" if denial.code == "sni_not_granted" else "tcp"
    return kernel.Connect(found["v6"] or found["host"], int(found["port"]), by)


def _of_packet(denial: Denial, sight: Sight) -> Question | None:
    found = _HOST_PORT.fullmatch(denial.target)
    if found is None or found["port"] is None or found["protocol"] not in ("tcp", "udp"):
        return None
    host, port = found["v6"] or found["host"], int(found["port"])
    if found["protocol"] == "udp":
        return kernel.Connect(host, port, "udp")
    return kernel.Connect(host, port, "tls" if port == HTTPS else "tcp")


def _of_program(target: str) -> Question:
    return kernel.Call(target) if target == denials.EXECVE else files.Execute(target)


def _is_open(sight: Sight) -> bool:
    """Whether the mode alone grants destinations, without a list."""
    return hostnames.EVERY in dict(sight.found.grants.network.names)


def _of_limit(denial: Denial, sight: Sight) -> Question | None:
    return limit.Limit.more(denial.target, sight) if denial.target in limit.KEYS else None


def _has_tools(sight: Sight) -> bool:
    """Whether the policy grants a tool."""
    return bool(sight.found.grants.skills.allow.names) or sight.found.grants.skills.allow.any


def _of_call(denial: Denial, sight: Sight) -> Question | None:
    """More of a limit of calls. Limits without a granted tool are none."""
    limits = denial.code in CALLS and _has_tools(sight)
    return tools.MoreCalls.more(denial.code, sight) if limits else None


_QUESTIONS: Final[Mapping[str, Callable[[Denial, Sight], Question | None]]] = {
    "dns": _of_name,
    "sni": _of_hello,
    "packet": _of_packet,
    "syscall": lambda denial, sight: kernel.Call(denial.target),
    "path": lambda denial, sight: files.Open(denial.target, write=denial.code == denials.READ_ONLY),
    "exec": lambda denial, sight: _of_program(denial.target),
    "credential": lambda denial, sight: kernel.Credential(denial.target),
    **dict.fromkeys(("memory", "pids", "time", "disk"), _of_limit),
    "tool": _of_call,
}


def _inject_note(denial: Denial) -> str:
    """Return the lines of an entry that would grant a request with a secret."""
    found = _REQUEST.match(denial.target)
    if denial.code in ("secret_absent", "secret_taken"):
        return "an operator puts it there: covenant vault put AGENT NAME"
    if denial.code == "host_failed":
        return "where another authority signed for the host, the operator names it: [tls] ca in config.toml"
    approved = ("request_not_granted", denials.NOT_APPROVED)
    if denial.code not in approved or found is None or found["method"] in ("CONNECT", "TRACE"):
        return "no line of agent.toml allows it"
    listed = f"methods = [{text.toml(found['method'])}], paths = [{text.toml(found['path'])}]"
    return f"add to inject of the entry for {found['host']}: {listed}"


def _ssh_note(denial: Denial) -> str:
    """Return the line that would grant a signature at a host."""
    if denial.code == "host_not_granted":
        key = text.toml(denial.target if " " in denial.target else "TYPE BASE64")
        return f"add to hosts of [[services.ssh_agent]]: {{ name = NAME, keys = [{key}] }}"
    if denial.code == "key_not_granted":
        host = text.toml(denial.target.rpartition(" at ")[2])
        return f"add [[services.ssh_agent]] with the secret of this key and name = {host} in hosts"
    if denial.code == "unavailable":
        return "an operator puts it there: covenant vault put AGENT NAME, a private key without a passphrase"
    return "no line of agent.toml allows it"


def _tool_note(denial: Denial, sight: Sight) -> str:
    """Return what ends a denial of a tool or a command; nothing for a limit. The caller was told the whole lines."""
    uri, _, argument = denial.target.partition(" ")
    if (found := command.bound(uri)) is not None:
        return _command_note(denial, found[0], argument or command.ALL)
    if denial.code == denials.NOT_GRANTED or not _has_tools(sight):
        return f"covenant policy why PACKAGE --tool {denial.target} says what to add"
    if denial.code == denials.ARGUMENTS:
        lines = f"tool = {text.toml(uri)}, argument = {text.toml(argument) if argument else 'NAME'}, equals = VALUE"
        return f"add [[permissions.skills.rule]] with {lines}: the answer to the call had the value"
    if denial.code == denials.NOT_APPROVED:
        return f"covenant approvals list shows what waits; without a question: take {text.toml(uri)} out of ask"
    if denial.code == "not_offered":
        return "start the run by the daemon (covenant intent), as a caller with the capability of the tool"
    return ""


def _command_note(denial: Denial, name: str, argument: str) -> str:
    if denial.code == denials.NOT_GRANTED:
        return f"add [[tools.command]] with name = {text.toml(name)} and the agent that runs"
    if denial.code == denials.ARGUMENTS:
        line = f"argument = {text.toml(argument)}, equals = VALUE"
        return f"add [[tools.command.rule]] below {name} with {line}: the answer to the call had the value"
    if denial.code == denials.NOT_APPROVED:
        return f"covenant approvals list shows what waits; without a question: take ask out of {name}"
    return "" if denial.code in CALLS else "call it again when others have ended"


def _layer_note(denial: Denial, sight: Sight) -> str:
    if denial.layer == "tool":
        return _tool_note(denial, sight)
    return services.note(denial, sight.found.grants.services) if denial.layer == "model" else ""


def _note(denial: Denial, answer: Answer | None, sight: Sight) -> str:
    if denial.layer == "time" and denial.target in _CLOCKS:
        return _CLOCKS[denial.target]
    if denial.code == denials.REST_CODE:
        return f"beyond a layer's rate, or the {denials.MAX_ROWS} rows of a run, there is only the number"
    if said := _layer_note(denial, sight):
        return said
    if denial.code == denials.NOT_APPROVED and denial.layer in ("dns", "sni"):
        return _ASKED
    if denial.code == denials.ARGUMENTS:
        return "with which arguments is what `covenant policy why --syscall` says; no line changes it"
    if answer is not None and answer.add and denial.layer in ("dns", "sni", "packet") and _is_open(sight):
        return _REPLACES
    if answer is not None and answer.allowed:
        return "the package as it is now allows it: it was changed since this run"
    if noted := _NOTES.get((denial.layer, denial.code)):
        return noted
    return "no line of agent.toml allows it" if answer is None else ""
