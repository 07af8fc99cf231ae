"""Pages between processes: a sender offers pages under a lease, a receiver reads them by NIXL.

    sender     | status: generation 7, 2 layers ready   | 4 ready |           | generation 8 | free
    receiver   | READ status | READ layers 0-1 | READ status | READ 2-3 | READ status | "done"

NIXL's READs are one-sided: the sender grants nothing, and only polls, since UCX emulates some of
them. Each offer has a *status*, 64 bytes of the sender's registered memory: its generation, and how
many layers are ready. The ticket has its address, and the addresses of the pages. Why no wrong byte
is passed on:

- The sender raises the generation before it frees or reuses a page of the offer. A receiver passes
  a layer on only when a READ of the status, posted after the READ of the layer has ended, still
  shows the ticket's generation. So at a moment after the layer was read the pages were still
  offered, and what was read is what was offered.
- The count of ready layers is raised after the work that writes a layer. A receiver reads a layer
  only after it has read a status which includes the layer.
- A status has a keyed digest. One that is read while it is written, in whatever pieces and order,
  does not verify, and is read again. The key is in the ticket, so no other memory verifies either.
- A receiver's pages, and the place for the status, stay busy until NIXL has reported the end of
  each READ that was posted, also after a cancelled, late or failed pull.

The bytes of pages have no checksum: a READ that NIXL reports as done has moved them, or the
transport beneath it is broken.
"""
