"""All rooms, in the order in which one walks through them."""

from tests.museum.rooms import quantizing, routing, summing, waiting, workspace

ROOMS = (workspace.ROOM, quantizing.ROOM, summing.ROOM, routing.ROOM, waiting.ROOM)
EXHIBITS = tuple(exhibit for room in ROOMS for exhibit in room.exhibits)
