"""Reports: one page about what was compiled, to be opened, sent and compared.

In: the records of compilations, with the details that they keep where a report was asked for (`ferrite.debug.details`).
Out: plain data (`data`), which is the record as JSON, and a page around it (`page`), which needs no network.
"""

from ferrite.reports.compare import Change, as_text, compare, read_record
from ferrite.reports.compare_page import compare_page
from ferrite.reports.write import check_place, report, written_at_exit

__all__ = ["Change", "as_text", "check_place", "compare", "compare_page", "read_record", "report", "written_at_exit"]
