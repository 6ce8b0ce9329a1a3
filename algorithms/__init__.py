"""The algorithms: one file each. To Python this folder is `fedbench.algorithms`, in a checkout as in an installed package."""

if __name__ == "algorithms":
    from fedbench.old_names import give_way

    give_way(__name__, __file__)
