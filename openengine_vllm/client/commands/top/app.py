"""The screen of `top`. All of Textual is behind this module, and nothing else imports it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from openengine_vllm.client import Client
from openengine_vllm.client.commands.events import (
    EVENT_TYPES,
    attribute_text,
    event_time,
    type_name,
)
from openengine_vllm.client.commands.running import INTERRUPTED, SUCCESS
from openengine_vllm.client.commands.top import lines
from openengine_vllm.client.commands.top.feed import Feed
from openengine_vllm.client.commands.top.monitor import HISTORY_SECONDS, Link, Monitor
from openengine_vllm.protocol import v1 as pb

INTERVALS: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds, as + and - step through them."""

SUBSCRIBE_AGAIN_SECONDS: Final = 1.0
"""How soon after the stream of events has ended."""
_DRAW_SECONDS = 0.5
_Types = tuple[pb.RuntimeEventType.ValueType, ...]
_TERMINATED = 143
_STYLES: Final = {
    "": "",
    "label": "$text-muted",
    "good": "$success",
    "warn": "$warning",
    "bad": "$error",
    "curve": "$accent",
}
_BADGES: Final = {
    "good": "bold $background on $success",
    "warn": "bold $background on $warning",
    "bad": "bold $background on $error",
}
_KEYS: Final = """\
 q  quit (Ctrl-C as well)
 p  pause: the screen stands still, what happens is still recorded
 f  filter: all types of events, or one of them
 +  ask less often
 -  ask more often
 arrows, page up, page down, ctrl+home, ctrl+end
    scroll the events; at the end they follow by themselves
 ?  this help; any key closes it

What the engine doesn't report is shown as -. Times are UTC.
Throughput is what the engine says: vLLM's mean over 10 seconds."""


class Help(ModalScreen[None]):
    """The keys."""

    def compose(self) -> ComposeResult:
        """A box of text."""
        yield Static(_KEYS, markup=False, id="help")

    def on_key(self) -> None:
        """Goes away."""
        self.dismiss()


class Top(App[int]):
    """The live view of one server; its result is the exit code.

    Args:
        client: the connection, whose own timeout bounds each question.
        target: the address, for the title.
        interval: seconds between questions.
        types: events to begin with; all when empty.
        clock: seconds since the epoch.
        pace: waits for some seconds.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title { padding: 0 1; height: 1; background: $panel; }
    #about { padding: 0 1; max-height: 3; }
    #sentence { padding: 0 1; display: none; color: $warning; }
    #sentence.shown { display: block; }
    #figures { border: round $primary; padding: 0 1; }
    #ranks { border: round $primary; padding: 0 1; height: auto; max-height: 10; }
    #events { border: round $primary; height: 1fr; min-height: 5; padding: 0 1; }
    .stale { opacity: 50%; }
    Help { align: center middle; }
    #help { width: auto; border: round $accent; padding: 1 2; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("p", "pause", "pause"),
        Binding("f", "filter", "filter"),
        Binding("plus", "interval(1)", "slower", key_display="+"),
        Binding("minus", "interval(-1)", "faster", key_display="-"),
        Binding("question_mark", "keys", "help", key_display="?"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(
        self,
        client: Client,
        target: str,
        interval: float,
        types: Sequence[pb.RuntimeEventType.ValueType] = (),
        *,
        clock: Callable[[], float] = time.time,
        pace: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self.monitor = Monitor()
        self._feed = Feed(client, self.monitor, clock)
        self._target = target
        self._interval = interval
        self._clock = clock
        self._pace = pace
        first = tuple(types)
        others: list[_Types] = [(), *((number,) for number in EVENT_TYPES.values())]
        self._choices: list[_Types] = [first, *(one for one in others if one != first)]
        self._paused = False
        self._drawable = False
        self._drawn_events = 0
        self._following = True
        self._last_y = 0

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield Static(id="title")
        yield Static(id="about")
        yield Static(id="sentence", markup=False)
        yield Static(id="figures")
        with VerticalScroll(id="ranks", can_focus=False):
            yield Static(id="rank-lines")
        table: DataTable[Text] = DataTable(id="events", cursor_type="none", zebra_stripes=False)
        table.add_columns("time", "type", "attributes")
        yield table
        yield Footer()

    def on_mount(self) -> None:
        """Begins to ask, and to draw."""
        self._drawable = True
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.exit, _TERMINATED)
        self.query_one("#figures").border_title = f"load, last {HISTORY_SECONDS // 60} minutes"
        self.query_one("#ranks").border_title = "ranks"
        self.query_one("#events").focus()
        self._ask()
        self._follow()
        self._draw()
        self.set_interval(_DRAW_SECONDS, self._draw)

    def on_unmount(self) -> None:
        """Leaves signals as they were."""
        self._drawable = False
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    def on_resize(self) -> None:
        """Fits the lines to the width, also while paused."""
        self._draw(force=True)

    async def action_quit(self) -> None:
        """q."""
        self.exit(SUCCESS)

    def action_interrupt(self) -> None:
        """Ctrl-C, which the terminal gives us as a key."""
        self.exit(INTERRUPTED)

    def action_pause(self) -> None:
        """p."""
        self._paused = not self._paused
        self._draw(force=True)

    def action_filter(self) -> None:
        """f."""
        self._choices.append(self._choices.pop(0))
        self._drawn_events = -1
        self._follow()
        self._draw(force=True)

    def action_interval(self, direction: int) -> None:
        """+ and -."""
        if direction > 0:
            steps = [seconds for seconds in INTERVALS if seconds > self._interval][:1]
        else:
            steps = [seconds for seconds in INTERVALS if seconds < self._interval][-1:]
        if steps:
            [self._interval] = steps
            self._ask()
            self._draw(force=True)

    def action_keys(self) -> None:
        """?."""
        self.push_screen(Help())

    def _ask(self) -> None:
        self.run_worker(self._poll(), group="poll", exclusive=True)

    async def _poll(self) -> None:
        while True:
            await self._feed.poll()
            self._draw()
            await self._pace(self._interval)

    def _follow(self) -> None:
        self.run_worker(self._subscribe(self._choices[0]), group="events", exclusive=True)

    async def _subscribe(self, types: Sequence[pb.RuntimeEventType.ValueType]) -> None:
        while True:
            await self._feed.follow_events(types)
            await self._pace(SUBSCRIBE_AGAIN_SECONDS)

    def _draw(self, force: bool = False) -> None:
        if not self._drawable or (self._paused and not force):
            return
        base = self.screen_stack[0]
        if not base.query("#title"):
            return  # The app ends: its widgets go before it is told.
        word, style, sentence = lines.state(self.monitor)
        width, now = self.size.width - 6, self._clock()
        title: lines.Line = [
            ("openengine-vllm top  ", "bold"),
            (f"{self._target}  ", ""),
            (f" {word} ", _BADGES[style]),
            (f"  {lines.clock(now)} UTC, every {self._interval:g} s", _STYLES["label"]),
        ]
        if self._paused:
            title += [("  ", ""), (" PAUSED ", _BADGES["warn"])]
        base.query_one("#title", Static).update(Content.assemble(*title))
        base.query_one("#about", Static).update(_content([lines.about(self.monitor)]))
        base.query_one("#sentence", Static).update(sentence)
        base.query_one("#sentence").set_class(bool(sentence), "shown")
        figures = base.query_one("#figures", Static)
        figures.update(_content(lines.figures(self.monitor, now, width)))
        base.query_one("#rank-lines", Static).update(_content(lines.ranks(self.monitor, width)))
        stale = self.monitor.link is not Link.UP
        for name in ("#figures", "#ranks"):
            base.query_one(name).set_class(stale, "stale")
        self._draw_events()

    def _draw_events(self) -> None:
        table = self.screen_stack[0].query_one("#events", DataTable)
        monitor, types = self.monitor, self._choices[0]
        # Who scrolls back is left alone until he is at the end again. Rows count for the
        # scrolling only after a refresh, so not being at the end says nothing by itself.
        y = table.scroll_offset.y
        if y >= table.max_scroll_y:
            self._following = True
        elif y < self._last_y:
            self._following = False
        self._last_y = y
        names = ", ".join(name for name, number in EVENT_TYPES.items() if number in types)
        title = f"events: {names or 'all types'}, {monitor.events_seen:,} seen"
        if monitor.events_problem:
            title += f" - {monitor.events_problem}"
        table.border_title = Content(title)
        new = monitor.events_seen - self._drawn_events
        if not new:
            if self._following and y < table.max_scroll_y:
                self._scroll_to_end(table)
            return
        if self._drawn_events < 0 or table.row_count + new > 2 * len(monitor.events):
            table.clear()
            self._last_y = 0
            new = len(monitor.events)
        self._drawn_events = monitor.events_seen
        for event in list(monitor.events)[-new:]:
            if not types or event.type in types:
                cells = event_time(event), type_name(event), attribute_text(event)
                # As they are: a plain str would be read as markup.
                table.add_row(*map(Text, cells))
        if self._following:
            self._scroll_to_end(table)

    def _scroll_to_end(self, table: DataTable[Text]) -> None:
        table.scroll_end(animate=False, force=True, on_complete=self._scrolled)

    def _scrolled(self) -> None:
        self._last_y = self.screen_stack[0].query_one("#events", DataTable).scroll_offset.y


def _content(shown: Sequence[lines.Line]) -> Content:
    pieces: lines.Line = []
    for line in shown:
        pieces += [(text, _STYLES[style]) for text, style in line]
        pieces.append(("\n", ""))
    return Content.assemble(*pieces[:-1])
