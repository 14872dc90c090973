"""A server with the routes of the HuggingFace Hub by which fsspec reads a data set."""

import hashlib
import json
import urllib.parse

from range_server import RangeServer

_API, _FILES = "/api/datasets/owner/name", "/datasets/owner/name/resolve/main/"


class HubServer(RangeServer):
    """Serves the files of a folder as the files of the data set ``owner/name``."""

    async def _respond(self, head, body, writer):
        """Responds to a request; returns whether the connection stays open."""
        method, target, _ = head.partition("\r\n")[0].split(" ")
        path = urllib.parse.unquote(target.partition("?")[0])
        if not path.startswith(_API):
            return await super()._respond(head.replace(f" {_FILES}", " /", 1), body, writer)
        kind = path.removeprefix(_API).split("/")[1:2]
        if kind == ["tree"]:
            answer = [self._entry(file.name) for file in sorted(self.folder.iterdir())]
        elif method == "POST":  # paths-info
            names = urllib.parse.parse_qs(body.decode()).get("paths") or json.loads(body)["paths"]
            answer = [self._entry(name) for name in names if (self.folder / name).exists()]
        else:
            answer = {"id": "owner/name", "sha": "0" * 40, "tags": [], "siblings": []}
        lines = "Content-Type: application/json\r\n"
        return self._send(writer, 200, json.dumps(answer).encode(), lines)

    def _entry(self, name):
        data, tag = self.content(name)
        oid = hashlib.sha1(tag.encode()).hexdigest()
        return {"type": "file", "oid": oid, "size": len(data), "path": name}
