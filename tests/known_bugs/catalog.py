"""All kinds of known bugs, in the order of the page."""

from tests.known_bugs.kinds import quantizing, routing, summing, waiting, workspace

KINDS = (workspace.KIND, quantizing.KIND, summing.KIND, routing.KIND, waiting.KIND)
KNOWN_BUGS = tuple(bug for kind in KINDS for bug in kind.bugs)
