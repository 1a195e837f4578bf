// The Python face of the store: `specplug_ngram._store`. The interpreter runs on while a method works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "store.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using ngram::Store;

using Matrix = nb::ndarray<int64_t, nb::shape<-1, -1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<int64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

namespace {

template <class Call>
ngram::Stats unlocked_call(Call call) {
  const nb::gil_scoped_release unlocked;
  return call();
}

nb::dict as_dict(const ngram::Stats& stats) {
  nb::dict found;
  found["lookups"] = stats.lookups;
  found["declined"] = stats.declined;
  found["tokens"] = stats.tokens;
  found["forgotten"] = stats.forgotten;
  found["bytes"] = stats.bytes;
  found["nodes"] = stats.nodes;
  found["entries"] = stats.entries;
  return found;
}

}  // namespace

NB_MODULE(_store, module) {
  module.doc() = "What requests said, and what followed the same tokens before.";
  module.attr("LEAST_BYTES") = Store::kLeast;
  module.attr("OWN") = static_cast<uint32_t>(ngram::kOwn);
  module.attr("SHARED") = static_cast<uint32_t>(ngram::kShared);
  module.attr("CORPUS") = static_cast<uint32_t>(ngram::kCorpus);
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Store>(module, "Store")
      .def(
          "__init__",
          [](Store* self, uint32_t slots, uint32_t nodes, uint64_t bytes, uint32_t max_depth, uint32_t min_match,
             uint32_t min_breadth, uint32_t max_breadth, bool by_count, double min_confidence, double min_gain,
             bool shared, uint32_t corpus_nodes) {
            new (self) Store({max_depth, min_match, min_breadth, max_breadth, by_count, min_confidence, min_gain},
                             {slots, nodes, corpus_nodes, bytes, shared});
          },
          nb::kw_only(), "slots"_a, "nodes"_a, "bytes"_a, "max_depth"_a, "min_match"_a, "min_breadth"_a,
          "max_breadth"_a, "by_count"_a, "min_confidence"_a, "min_gain"_a, "shared"_a = false, "corpus_nodes"_a = 0)
      .def("add_document", &Store::add_document, "tokens"_a, unlocked)
      .def("admit", &Store::admit, "slot"_a, "known"_a = 0, unlocked)
      .def("release", &Store::release, "slot"_a, unlocked)
      .def("insert", &Store::insert, "slots"_a, "tokens"_a, unlocked)
      .def(
          "propose",
          [](Store& self, const std::vector<uint32_t>& slots, const std::vector<int64_t>& limits, uint32_t depth,
             Matrix tokens, Matrix parents, Vector num_valid) {
            if (tokens.shape(0) != parents.shape(0) || tokens.shape(1) != parents.shape(1) ||
                tokens.shape(0) != num_valid.shape(0))
              throw nb::value_error("tokens [rows, N], parents [rows, N] and num_valid [rows] differ in shape");
            self.propose(slots, limits, depth, tokens.data(), parents.data(), tokens.shape(1), num_valid.data(),
                         num_valid.shape(0));
          },
          "slots"_a, "limits"_a, "depth"_a, "tokens"_a.noconvert(), "parents"_a.noconvert(), "num_valid"_a.noconvert(),
          unlocked)
      .def("followers", &Store::followers, "slot"_a, "context"_a, "source"_a = 0, unlocked)
      .def("anchors", &Store::anchors, "slot"_a, "source"_a = 0, unlocked)
      .def(
          "held",
          [](const Store& self, uint32_t slot, uint32_t source) {
            return as_dict(unlocked_call([&] { return self.held(slot, source); }));
          },
          "slot"_a, "source"_a = 0)
      .def("stats", [](const Store& self) { return as_dict(unlocked_call([&] { return self.stats(); })); });
}
