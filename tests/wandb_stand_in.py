"""A loopback stand-in for the W&B service: enough GraphQL for `wandb sweep` and an agent that runs trials in turn.

It is NOT the service: it stores nothing, checks no key, searches nothing; its trials are handed in. What it shows is
that the real `wandb sweep` takes our sweep file, that the real `wandb agent` starts our command with arguments that the
recipe reader takes, and that the agent sees the runs end well. Unknown queries are answered with an error.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PLACE = {"id": "p", "name": "drafters", "entity": {"id": "e", "name": "nobody"}}
USER = {
    "__typename": "User",
    "id": "u",
    "entity": "nobody",
    "username": "nobody",
    "teams": {"edges": []},
}


class StandIn:
    """Answers on `url` between `with` and its end. `asked` holds (operation, variables) of every request."""

    def __init__(self, *trials: dict[str, Any]) -> None:
        self.trials = trials
        self.config = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.run_states: list[dict[str, bool]] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != "/graphql":  # usage figures, which nobody wants here
                    self.send_error(404)
                    return
                request = json.loads(body)
                answer = json.dumps(
                    stand_in.answer(request["query"], request.get("variables") or {})
                ).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        operation = found.group(1) if found else "?"
        self.asked.append((operation, variables))
        sweep: dict[str, Any] = {
            "id": "s",
            "name": "sweep1",
            "config": self.config,
            "state": "RUNNING",
        }
        match operation:
            case "Viewer":
                return {"data": {"viewer": USER}}
            case "UpsertSweep":
                self.config = variables["config"]
                return {
                    "data": {
                        "upsertSweep": {
                            "sweep": {"name": "sweep1", "project": PLACE},
                            "configValidationWarnings": [],
                        }
                    }
                }
            case "SweepWithRuns":
                return {"data": {"project": {"sweep": {**sweep, "runs": {"edges": []}}}}}
            case "CreateAgent":
                return {"data": {"createAgent": {"agent": {"id": "a"}}}}
            case "Heartbeat":
                return {
                    "data": {
                        "agentHeartbeat": {
                            "agent": {"id": "a"},
                            "commands": json.dumps(self.commands(variables)),
                        }
                    }
                }
        return {"errors": [{"message": f"the stand-in does not know {operation}"}]}

    def commands(self, variables: dict[str, Any]) -> list[dict[str, Any]]:
        """The next trial at each heartbeat of an idle agent, then nothing: the agent counts them and ends by itself."""
        self.run_states.append(json.loads(variables["runState"]))
        begun = sum(not state for state in self.run_states)
        if self.run_states[-1] or begun > len(self.trials):
            return []
        arguments = {key: {"value": value} for key, value in self.trials[begun - 1].items()}
        return [
            {"id": "1", "type": "run", "run_id": f"trial{begun}", "program": "", "args": arguments}
        ]
