"""All kinds of known bugs, in the order of the page."""

from tests.known_bugs.kinds import gradients, quantizing, routing, summing, waiting, workspace

KINDS = (workspace.KIND, quantizing.KIND, summing.KIND, routing.KIND, waiting.KIND, gradients.KIND)
KNOWN_BUGS = tuple(bug for kind in KINDS for bug in kind.bugs)
