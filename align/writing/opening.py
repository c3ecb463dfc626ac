"""The target as it is opened to write: here, in several processes, or beside the server that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from align.config.recipe import Recipe
from align.target.loading import load_target
from align.writing.outline import open_beside_server
from align.writing.processes import Processes
from align.writing.rows import Plan, Source
from align.writing.template import Told


@contextmanager
def opened(recipe: Recipe) -> Iterator[tuple[Told, Callable[[Plan], Source] | None]]:
    """The target, and who writes its rows where that is neither this process nor a server.

    Raises:
        UserError: it can't be had, or not on so many devices.
    """
    if recipe.data.server is not None:
        yield open_beside_server(recipe), None
    elif recipe.launch.devices == 1:
        yield load_target(recipe.target.name, device=recipe.target.device, **recipe.target_options), None
    else:
        with closing(Processes(recipe)) as processes:
            yield processes.target, processes.source
