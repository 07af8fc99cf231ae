"""kvcupy behind the interfaces of other libraries; each module imports its namesake."""
