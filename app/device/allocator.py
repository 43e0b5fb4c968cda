"""Options of torch's device allocator, as in PYTORCH_CUDA_ALLOC_CONF."""

EXPANDABLE = "expandable_segments"


def without_expandable_segments(options: str) -> str:
    """Return the options without the one for expandable segments.

    >>> without_expandable_segments("expandable_segments:True,max_split_size_mb:64")
    'max_split_size_mb:64'
    """
    return ",".join(option for option in options.split(",") if not option.strip().startswith(EXPANDABLE))


def expandable_segments_off(options: str) -> str:
    """Return the options with expandable segments off.

    >>> expandable_segments_off("expandable_segments:True,max_split_size_mb:64"), expandable_segments_off("")
    ('max_split_size_mb:64,expandable_segments:False', 'expandable_segments:False')
    """
    others = without_expandable_segments(options)
    return ",".join(option for option in (others, f"{EXPANDABLE}:False") if option)
