"""`baton top`: the fleet in a terminal, as a gateway tells of it once a second."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from time import time
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane

from services.config.option import Refusal
from services.top import columns
from services.top.commands import Commands, Launcher
from services.top.feed import GatewayClient, GatewayError
from services.top.screen.launcher_command import LauncherCommand
from services.top.screen.lists import List
from services.top.screen.questions import Confirmation, Numbers, RequestScreen, ScaleQuestion
from services.top.summary import summary, unhealthy
from services.top.timeline import as_text
from services.top.told import FleetEvent, Hello, Link, Request, Tick, Worker
from services.top.view import MAX_EVENTS, View

_RETRY_S = 2.0


class Top(App[str]):
    """The application. It returns a text where the gateway could not be asked at all."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: auto; padding: 0 1; background: $panel; }
    #unhealthy { height: auto; padding: 0 1; color: $text-error; }
    #said { height: auto; padding: 0 1; color: $text-muted; }
    #filter { display: none; height: 3; }
    #filter.open { display: block; }
    TabPane { padding: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("1", "tab('workers')", "Workers", show=False),
        Binding("2", "tab('links')", "Links", show=False),
        Binding("3", "tab('requests')", "Requests", show=False),
        Binding("4", "tab('events')", "Events", show=False),
        Binding("s", "sort('next')", "Sort"),
        Binding("S", "sort('turned')", "Turn"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "close_filter", "All", show=False),
        Binding("d", "drain", "Drain"),
        Binding("R", "restart", "Restart"),
        Binding("c", "scale", "Scale"),
    ]

    def __init__(self, client: GatewayClient, commands: Commands) -> None:
        super().__init__()
        self._client = client
        self._commands = commands
        self._view = View()
        self._own_events: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)  # what commands that were given here said
        self._was_heard = False
        self._lost: str | None = None  # why nothing is told now
        self._command = LauncherCommand(self, lambda name, line: self._note(name, "", line))
        self._summary = Static("connecting", id="summary", markup=False)
        self._unhealthy = Static("", id="unhealthy", markup=False)
        self._said = Static("", id="said", markup=False)
        self._filter = Input(placeholder="rows with this text; Enter: keep it, Escape: all rows", id="filter")
        self._lists: Mapping[str, List[Any]] = {
            "workers": List[Worker](columns.WORKERS, lambda worker: worker.address),
            "links": List[Link](columns.LINKS, lambda link: f"{link.prefill} {link.decode}"),
            "requests": List[Request](columns.REQUESTS, lambda request: str(request.n)),
            "events": List[FleetEvent](columns.EVENTS, _event_key),
        }
        self._rows_of: Mapping[str, Callable[[], Sequence[object]]] = {
            "workers": self._view.workers,
            "links": self._view.links,
            "requests": self._view.requests,
            "events": self._events,
        }
        self._tabs = TabbedContent()

    def compose(self) -> ComposeResult:
        """Lays out the lines above, the lists in tabs, and the keys below."""
        yield self._summary
        yield self._unhealthy
        with self._tabs:
            for name, rows in self._lists.items():
                with TabPane(name.capitalize(), id=name):
                    yield rows
        yield self._said
        yield self._filter
        yield Footer()

    def on_mount(self) -> None:
        """Begins to follow the gateway."""
        self._list().focus()
        self.run_worker(self._follow(), exclusive=True, group="feed")

    def on_unmount(self) -> None:
        """Leaves a command that is under way, so that no thread waits for it."""
        self._command.leave()

    async def _follow(self) -> None:
        """Takes in the feed, and opens it again when it ends. Where it never began, the application ends."""
        while True:
            try:
                async with aclosing(self._client.feed()) as feed:
                    async for told, _ in feed:
                        self._view.take(told)
                        if isinstance(told, Hello | Tick):
                            self._was_heard, self._lost = True, None
                            self._show()
            except GatewayError as error:
                if not self._was_heard:
                    self.exit(str(error))
                    return
                self._lost = str(error)
                self._show()
            await asyncio.sleep(_RETRY_S)

    def _show(self) -> None:
        view = self._view
        lost = [] if self._lost is None else [f"not connected: {self._lost}"]
        self._summary.update(summary(view))
        self._unhealthy.update("\n".join([*lost, *unhealthy(view)]))
        self._show_list(self._tab())

    def _show_list(self, tab: str) -> None:
        """Writes the rows of one list: the others are not seen, and are written when they are."""
        self._lists[tab].show(self._rows_of[tab](), time())

    def _events(self) -> Sequence[FleetEvent]:
        """Lists what the gateway told and what commands said here, the newest first."""
        return sorted([*self._view.events, *self._own_events], key=lambda event: event.at, reverse=True)

    def _tab(self) -> str:
        return self._tabs.active or next(iter(self._lists))

    def _list(self) -> List[Any]:
        return self._lists[self._tab()]

    # Keys

    async def action_quit(self) -> None:
        """Ends the application; asks first where that ends a command."""
        if self._command.name is None:
            self.exit()
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.exit()

        what = (
            f"A {self._command.name} is under way, and ends when you leave: what is done stays, the rest is not done."
        )
        self.push_screen(Confirmation(f"{what} Leave?"), answered)

    def action_tab(self, name: str) -> None:
        """Goes to a tab."""
        self._tabs.active = name
        self._list().focus()

    def on_tabbed_content_tab_activated(self, _: TabbedContent.TabActivated) -> None:
        """Writes the list of the tab, and gives the keys to it."""
        self._show_list(self._tab())
        if not self._filter.has_class("open"):
            self._list().focus()

    def action_sort(self, how: str) -> None:
        """Sorts the list by its next column, or turns its order."""
        if how == "turned":
            self._list().turn_order()
        else:
            self._say(f"sorted by: {self._list().sort_by_next()}")

    def action_filter(self) -> None:
        """Opens the field for a filter."""
        self._filter.add_class("open")
        self._filter.focus()

    def action_close_filter(self) -> None:
        """Shows all rows again."""
        self._filter.value = ""
        self._filter.remove_class("open")
        self._list().focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters all lists as the text is written."""
        if event.input is self._filter:
            for rows in self._lists.values():
                rows.filter_by(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keeps the filter, and gives the keys back to the list."""
        if event.input is self._filter:
            event.input.set_class(bool(event.value), "open")
            self._list().focus()

    def on_data_table_row_selected(self, _: List.RowSelected) -> None:
        """Opens the record of the chosen request."""
        chosen = self._list().chosen()
        if isinstance(chosen, Request):
            self.push_screen(RequestScreen(lambda width: self._read(chosen, width)))

    async def _read(self, request: Request, width: int) -> str:
        return as_text(await self._client.record(request.id, request.n), width)

    # What is done to the fleet

    def action_drain(self) -> None:
        """Asks whether the chosen worker is to be drained, and drains it."""
        chosen = self._list().chosen()
        if not isinstance(chosen, Worker):
            self._say("choose a worker to be drained (key 1)")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._drain(chosen.address), group="drains")

        what = f"Drain the {chosen.role} worker {chosen.address}? It takes no new work, and ends when it has finished."
        self.push_screen(Confirmation(what), answered)

    async def _drain(self, worker: str) -> None:
        self._note("drain", worker, "begins")
        try:
            self._note("drain", worker, await self._commands.drain(worker))
        except Refusal as refusal:
            self._note("drain", worker, str(refusal))

    def action_restart(self) -> None:
        """Asks whether all processes are to be replaced, and has the launcher do it."""
        if (launcher := self._launcher()) is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._command.begin("restart", launcher, launcher.restart)

        what = "Restart all workers and the gateway, one by one? They serve meanwhile."
        self.push_screen(Confirmation(what), answered)

    def action_scale(self) -> None:
        """Asks the launcher for its workers, then how many there are to be, and has it start or end some.

        The gateway's own list is another one: it has workers of other machines, and none that is just restarted.
        """
        if (launcher := self._launcher()) is None:
            return

        self._command.ask("scale", launcher, lambda: launcher.scale({}), lambda here: self._ask_numbers(launcher, here))

    def _ask_numbers(self, launcher: Launcher, here: str) -> None:
        def answered(numbers: Numbers | None) -> None:
            if numbers is not None:
                self._command.begin("scale", launcher, lambda: launcher.scale(numbers))

        self.push_screen(ScaleQuestion(here), answered)

    def _launcher(self) -> Launcher | None:
        """Finds the launcher of the gateway, or says why there is none to be told."""
        if self._command.name is not None:
            self._say("another command is under way")
            return None
        gateway = None if self._view.tick is None else self._view.tick.gateway
        pid = None if gateway is None else gateway.pid
        found = None if pid is None or not self._client.is_here else self._commands.launcher_of(pid)
        if found is None:
            self._say("no `baton up` of this user on this machine runs this gateway: nobody can be told")
        return found

    def _note(self, kind: str, name: str, text: str) -> None:
        """Says it below the lists, and keeps it among the events."""
        self._own_events.append(FleetEvent(at=time(), kind=kind, name=name, text=text))
        self._say(f"{kind} {name}: {text}" if name else f"{kind}: {text}")
        self._show()

    def _say(self, text: str) -> None:
        self._said.update(text)


def _event_key(event: FleetEvent) -> str:
    return f"{event.at} {event.kind} {event.name} {event.text}"
