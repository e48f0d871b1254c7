"""The scenarios of `ingle bench kv`. Every one begins with an empty cache."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cli.bench.kv import ARM, Bench, repeated
from cli.bench.measures import percentile, stream_times
from cli.bench.private import PrivateNode
from cli.bench.report import Report

__all__ = ["SCENARIOS", "throttled"]

Messages = list[Mapping[str, Any]]

_WORDS = (
    "river stone lamp paper cloud engine garden window market silver train letter bridge forest "
    "copper island winter button mirror ladder harbour pocket candle meadow signal thunder basket "
    "violet anchor hammer planet ribbon saddle tunnel velvet whistle orchard compass lantern quarry"
).split()


def text(seed: int, n_words: int) -> str:
    """Words that differ from seed to seed from the first on; about as many tokens."""
    chosen = random.Random(seed)
    return " ".join([f"Note {seed}:", *(chosen.choice(_WORDS) for _ in range(n_words))])


def system(seed: int, n_words: int) -> Mapping[str, Any]:
    return {"role": "system", "content": text(seed, n_words)}


def user(seed: int, n_words: int = 30) -> Mapping[str, Any]:
    return {"role": "user", "content": text(seed, n_words)}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} in the workspace of the user.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "enum": ["notes.md", "todo.md"]},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }
    for name, what in (
        ("read_file", "Read a file"),
        ("list_files", "List files"),
        ("search", "Search text"),
    )
]


class Talk:
    """A conversation that grows by what the server answered."""

    def __init__(self, bench: Bench, messages: Messages, tools: Sequence[Any] = ()) -> None:
        self.messages = messages
        self._bench = bench
        self._tools = tools

    def say(self, message: Mapping[str, Any], **more: Any) -> str:
        self.messages.append(message)
        answer = self._bench.ask(self.messages, self._tools, **more)
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer.text


def s1(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """Three agents, kill -9, restart, the next turn of each."""

    def once() -> None:
        bench.begin()
        talks = [Talk(bench, [system(i, 600)], TOOLS) for i in range(3)]
        for i, talk in enumerate(talks):
            talk.say(user(10 + i))
        bench.settle()
        bench.restart()
        for i, talk in enumerate(talks):
            talk.say(user(20 + i))

    _tokens(bench, report, "S1", arm, runs, once)


def s2(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """Two agents with a shared 2k prefix, alternating, on a pool for one and a half."""

    def once() -> None:
        bench.begin(**{"engine.n_ctx": 4096})
        talks = [Talk(bench, [system(1, 1500), user(2 + i, 450)]) for i in range(2)]
        for turn in range(4):
            for i, talk in enumerate(talks):
                if turn == 0:
                    talk.say({"role": "user", "content": "Begin."})
                else:
                    talk.say(user(100 * turn + i, 20))

    _tokens(bench, report, "S2", arm, runs, once)


def s3(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """A tool loop whose calls have `content: null`, with pauses in which another agent works."""

    def once() -> None:
        bench.begin()
        messages: Messages = [system(1, 500), user(2)]
        other = Talk(bench, [system(3, 500)])
        for step in range(4):
            answer = bench.ask(messages, TOOLS, force="read_file", max_tokens=64)
            calls = answer.message.get("tool_calls")
            if not calls:
                raise RuntimeError("the server did not make the tool call that was asked for")
            result = {
                "role": "tool",
                "tool_call_id": calls[0]["id"],
                "content": text(50 + step, 60),
            }
            messages += [repeated(answer), result]
            other.say(user(30 + step, 20))
            time.sleep(0.5)
        bench.ask(messages, TOOLS)

    _tokens(bench, report, "S3", arm, runs, once)


def s4(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """After a restart a new conversation with the same system prompt and tools."""

    def once() -> None:
        bench.begin()
        talk = Talk(bench, [system(1, 900)], TOOLS)
        talk.say(user(2))
        talk.say(user(3))
        bench.settle()
        bench.restart()
        Talk(bench, [system(1, 900)], TOOLS).say(user(4))

    _tokens(bench, report, "S4", arm, runs, once)


def s5(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """An edit in the middle of a conversation, three times."""

    def once() -> None:
        bench.begin()
        talk = Talk(bench, [system(1, 600)])
        for turn in range(5):
            talk.say(user(10 + turn, 60))
        head = talk.messages[:5]  # up to the second answer
        for branch in range(3):
            bench.ask([*head, user(100 + branch, 60)])

    _tokens(bench, report, "S5", arm, runs, once)


def s6(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """Twenty contexts, twice around, DRAM for five of them and the device for four."""

    def once() -> None:
        dram_bytes = 5 * 450 * bench.bytes_per_token
        bench.begin(**{"engine.n_ctx": 2048, "kvcache.dram_bytes": dram_bytes})
        talks = [Talk(bench, [system(i, 300)]) for i in range(20)]
        for turn in range(2):
            for i, talk in enumerate(talks):
                talk.say(user(100 * turn + i, 20))

    _tokens(bench, report, "S6", arm, runs, once)


def s7(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """Bytes on disk after each turn of a conversation of ten."""
    if bench.node is None:
        report.add_missing("S7", arm, "bytes_on_disk", "the folder of another server is not known")
        return
    bench.begin()
    talk = Talk(bench, [system(1, 200)])
    for turn in range(10):
        talk.say(user(10 + turn, 60))
        bench.node.admin("POST", "kv/flush")
        on_disk = bench.node.kv_bytes()
        report.add("S7", arm, f"bytes_on_disk_turn_{turn + 1}", "bytes", [on_disk])
    tokens = len(bench.ledger.tokens(talk.messages)) - 1
    state_bytes = tokens * bench.bytes_per_token
    report.add("S7", arm, "bytes_on_disk", "bytes", [on_disk], floor=state_bytes, turns=10)
    report.add("S7", arm, "ratio_to_state", "ratio", [on_disk / state_bytes])
    _add_tokens(report, "S7", arm, [bench.count])


def s8(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """Kill -9 in the middle of stores, damaged files, a lost index: are the answers the same?"""
    if bench.node is None:
        report.add_missing("S8", arm, "wrong_answers", "the files of another server are not ours")
        return
    bench.begin()
    talks = [Talk(bench, [system(i, 300)]) for i in range(6)]
    for i, talk in enumerate(talks):
        talk.say(user(10 + i))
    heads = [list(talk.messages) for talk in talks]
    bench.restart()  # without a pause: what was not written is lost
    wanted = [
        bench.ask([*head, user(20 + i)], cache_prompt=False).text for i, head in enumerate(heads)
    ]
    bench.node.admin("POST", "kv/flush")
    _damage(bench.node)
    bench.restart()
    got = [bench.ask([*head, user(20 + i)]).text for i, head in enumerate(heads)]
    wrong = sum(a != b for a, b in zip(wanted, got, strict=True))
    report.add("S8", arm, "wrong_answers", "answers", [wrong], floor=0, turns=len(heads))
    _add_tokens(report, "S8", arm, [bench.count])


def s9(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """A running stream while a 2k prompt is computed and stored, with SSD on and off."""
    if bench.node is None:
        report.add_missing("S9", arm, "gap_p95_ms", "needs a node of our own with SSD off")
        return
    figures: dict[str, dict[str, list[float]]] = {}
    for i in range(runs):
        for name, ssd in ((arm, "true"), ("ssd_off", "false")):
            bench.begin(**{"kvcache.ssd": ssd})
            gaps_ms, ttft_ms = _stream_and_store(bench, seed=i)
            mine = figures.setdefault(name, {"gap_p95_ms": [], "ttft_ms": []})
            mine["gap_p95_ms"].append(percentile(gaps_ms, 0.95))
            mine["ttft_ms"].append(ttft_ms)
    for name, mine in figures.items():
        for metric, values in mine.items():
            report.add("S9", name, metric, "ms", values)
    for metric, on in figures[arm].items():
        off = figures["ssd_off"][metric]
        ratio = statistics.median(on) / statistics.median(off)
        report.add("S9", arm, f"{metric.removesuffix('_ms')}_ratio_to_off", "ratio", [ratio])


def _stream_and_store(bench: Bench, seed: int) -> tuple[list[float], float]:
    """Gaps of a stream that goes on while a long prompt comes, and that one's first token."""
    times: list[float] = []
    body = {"model": bench.model.name, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    bench.ask([user(900 + seed, 10)], max_tokens=2)  # warm
    prompt = text(700 + seed, 20)
    thread = threading.Thread(
        target=stream_times, args=(bench.url, {**body, "prompt": prompt}, times)
    )
    thread.start()
    while len(times) < 10:
        time.sleep(0.01)
    answer = bench.ask([system(800 + seed, 1500)], max_tokens=2)
    thread.join()
    gaps_ms = [1000 * (b - a) for a, b in zip(times, times[1:], strict=False)]
    return gaps_ms, answer.ttft_ms


def ready(bench: Bench, report: Report, arm: str, runs: int) -> None:
    """Start with 20,000 blocks on disk, against an empty cache."""
    if bench.node is None:
        report.add_missing("ready", arm, "ready_s", "needs a node of our own")
        return
    bench.begin()
    values: dict[str, list[float]] = {"empty": [], arm: []}
    for name in values:
        if name == arm:
            bench.ledger.fill_cache(bench.node.paths.kv, 20_000)
        for _ in range(max(3, runs)):
            bench.node.stop()
            values[name].append(bench.node.start({"engine.n_ctx": 2048}))
    for name, seconds in values.items():
        report.add("ready", name, "ready_s", "s", seconds)
    ratio = statistics.median(values[arm]) / statistics.median(values["empty"])
    report.add("ready", arm, "ratio_to_empty", "ratio", [ratio])


def throttled(
    bench: Bench,
    report: Report,
    ratios: Sequence[float],
    runs: int,
    say: Callable[[str], None],
) -> None:
    """Time to the first token where the disk is so many times as fast as computing."""
    if bench.node is None:
        report.add_missing("throttle", ARM, "ttft_ms", "needs a node of our own")
        return
    for ratio in ratios:
        say(f"throttle: a disk {ratio:g} times as fast as computing")
        restored, computed, n_ssd = [], [], []
        for i in range(runs):
            bench.begin(**{"kvcache.dram": "false"})
            talk = Talk(bench, [system(i, 900)])
            talk.say(user(10 + i), max_tokens=2)
            computed.append(bench.count.ttft_ms[-1])
            n_prompt = len(bench.ledger.tokens(talk.messages[:-1]))
            token_s = computed[-1] / 1000 / n_prompt
            bench.node.admin("POST", "kv/flush")
            speed = ratio * bench.bytes_per_token / token_s
            bench.restart(**{"kvcache.ssd_read_bytes_per_s": speed})
            bench.ask([user(500 + i, 10)], max_tokens=2)  # the first request pages the weights in
            restored.append(_next_turn_ms(bench, talk, user(20 + i)))
            tokens = bench.node.admin("GET", "kv")["models"][0]["prompt_tokens"]
            n_ssd.append(tokens["ssd"])
        label = f"throttle_{ratio:g}"
        report.add(label, "full_prefill", "ttft_ms", "ms", computed)
        report.add(label, ARM, "ttft_ms", "ms", restored)
        report.add(label, ARM, "ssd_tokens", "tokens", n_ssd)
        pairs = [a / b for a, b in zip(restored, computed, strict=True)]
        report.add(label, ARM, "ratio_to_full_prefill", "ratio", pairs)


def _next_turn_ms(bench: Bench, talk: Talk, message: Mapping[str, Any]) -> float:
    bench.ask([*talk.messages, message], max_tokens=2)
    return bench.count.ttft_ms[-1]


def _damage(node: PrivateNode) -> None:
    """A flipped byte, a cut file, a file gone, no index."""
    node.kill()
    files = sorted(node.paths.kv.rglob("*.kv"))
    middle = files[0].stat().st_size // 2
    with files[0].open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 1]))
    with files[len(files) // 3].open("r+b") as file:
        file.truncate(middle)
    files[2 * len(files) // 3].unlink()
    for path in node.paths.kv.glob("index.db*"):
        path.unlink()


def _tokens(
    bench: Bench, report: Report, scenario: str, arm: str, runs: int, once: Callable[[], None]
) -> None:
    counts = []
    for _ in range(runs):
        once()
        counts.append(bench.count)
    _add_tokens(report, scenario, arm, counts)


def _add_tokens(report: Report, scenario: str, arm: str, counts: Sequence[Any]) -> None:
    if any(count.unknown for count in counts):
        reason = "the server does not say how many tokens it computed"
        report.add_missing(scenario, arm, "prompt_tokens_computed", reason)
        return
    values = [count.computed for count in counts]
    more = {"floor": counts[-1].floor, "turns": counts[-1].turns}
    report.add(scenario, arm, "prompt_tokens_computed", "tokens", values, **more)
    ttft = [statistics.mean(count.ttft_ms) for count in counts]
    report.add(scenario, arm, "ttft_ms", "ms", ttft)


SCENARIOS: Mapping[str, Callable[[Bench, Report, str, int], None]] = {
    "S1": s1,
    "S2": s2,
    "S3": s3,
    "S4": s4,
    "S5": s5,
    "S6": s6,
    "S7": s7,
    "S8": s8,
    "S9": s9,
    "ready": ready,
}
