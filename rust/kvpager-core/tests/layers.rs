//! The two floors of the crate, held against its imports: no circle of modules, and no import that points upward.
//!
//! A module is what `lib.rs` declares: a file, or a folder, whose files are its parts and share its private fields. An
//! import is a path in a `use crate::` line, or a `crate::` path in code; tests and comments do not count. It points to
//! the module that defines the name: a name at the top of the crate to the one that `lib.rs` exports it from.
//! [`FLOORS`] is the order in which `lib.rs` says to read. Among the parts of a folder, `mod.rs` may name every part
//! and be named by it; the others must not name each other in a circle.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Lowest first.
const FLOORS: [&str; 17] = [
    "ids",
    "error",
    "info",
    "stats",
    "links",
    "eviction",
    "config",
    "prompt",
    "index",
    "pool",
    "copies",
    "pins",
    "chain",
    "sequences",
    "place",
    "batch",
    "manager",
];

type Imports = BTreeMap<String, BTreeSet<String>>;

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(sources(&path)) } else { files.push(path) }
    }
    files
}

/// `index/keys.rs` → `index::keys`, `index/mod.rs` → `index`.
fn module_of(file: &Path) -> String {
    let name = file.with_extension("").to_str().unwrap().replace('/', "::");
    name.strip_suffix("::mod").map(str::to_owned).unwrap_or(name)
}

/// The code of a file without comments and without its tests, which stand at its end.
fn code_of(text: &str) -> String {
    let code =
        text.split("#[cfg(test)]\n#[expect").next().unwrap().split("#[cfg(test)]\nmod tests").next().unwrap();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Every path that a `use` line or a `crate::` in the code names, groups spelled out: `crate::pool::Pool`.
fn paths(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|before| before.is_alphanumeric() || before == ':' || before == '_') {
                continue;
            }
            let rest = &code[at..];
            let end =
                rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(rest.len());
            let path = &rest[..end];
            match rest[end..].strip_prefix('{') {
                Some(group) if path.ends_with("::") => {
                    let names = &group[..group.find('}').unwrap()];
                    let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
                    found.extend(names.map(|name| format!("{path}{name}")));
                }
                _ => found.push(path.to_owned()),
            }
        }
    }
    found
}

/// Which module each name at the top of the crate comes from.
fn exports(lib: &str) -> BTreeMap<String, String> {
    let mut from = BTreeMap::new();
    for line in code_of(lib).split(';').filter_map(|line| line.trim().strip_prefix("pub use ")) {
        let (module, names) = line.rsplit_once("::").unwrap();
        for name in names.trim_matches(['{', '}']).split(',').map(str::trim) {
            from.insert(name.to_owned(), module.to_owned());
        }
    }
    from
}

fn imports() -> Imports {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let exported = exports(&std::fs::read_to_string(root.join("lib.rs")).unwrap());
    let files: Vec<(String, String)> = sources(&root)
        .iter()
        .map(|path| (module_of(path.strip_prefix(&root).unwrap()), std::fs::read_to_string(path).unwrap()))
        .filter(|(module, _)| module != "lib")
        .collect();
    let modules: BTreeSet<&String> = files.iter().map(|(module, _)| module).collect();
    let mut imports = Imports::new();
    for (module, text) in &files {
        let parent = module.rsplit_once("::").map_or("", |(parent, _)| parent);
        let targets = imports.entry(module.clone()).or_default();
        for path in paths(&code_of(text)) {
            let path = path.replacen("super::", &format!("crate::{parent}::"), 1);
            let name = path.trim_start_matches("crate::").trim_matches(':');
            let top = name.split("::").next().unwrap();
            let full = exported.get(top).map_or(name.to_owned(), |module| format!("{module}::{name}"));
            // The longest part of the path that is a module; a name of lib.rs itself is none.
            let mut target = full.as_str();
            while !modules.contains(&target.to_owned()) {
                let Some((shorter, _)) = target.rsplit_once("::") else { break };
                target = shorter;
            }
            if target != module {
                let target = if modules.contains(&target.to_owned()) { target } else { "lib" };
                targets.insert(target.to_owned());
            }
        }
    }
    imports
}

fn top(module: &str) -> &str {
    module.split("::").next().unwrap()
}

/// The imports from module to module.
fn between_modules(imports: &Imports) -> Imports {
    let mut between = Imports::new();
    for (from, to) in imports {
        let others = to.iter().map(|to| top(to)).filter(|&to| to != top(from)).map(str::to_owned);
        between.entry(top(from).to_owned()).or_default().extend(others);
    }
    between
}

/// The imports from part to part of the same folder, `mod.rs` aside.
fn between_parts(imports: &Imports) -> Imports {
    let is_part = |from: &str, to: &str| top(from) == top(to) && from.contains("::") && to.contains("::");
    let parts =
        |from: &str, to: &BTreeSet<String>| to.iter().filter(|to| is_part(from, to)).cloned().collect();
    imports.iter().map(|(from, to)| (from.clone(), parts(from, to))).collect()
}

fn floor(module: &str) -> usize {
    FLOORS.iter().position(|&name| name == module).unwrap_or(FLOORS.len())
}

/// A circle among the modules, if there is one.
fn circle(imports: &Imports) -> Option<Vec<String>> {
    fn walk(at: &str, imports: &Imports, path: &mut Vec<String>, done: &mut BTreeSet<String>) -> bool {
        if path.iter().any(|module| module == at) {
            path.push(at.to_owned());
            return true;
        }
        if !done.insert(at.to_owned()) {
            return false;
        }
        path.push(at.to_owned());
        let found =
            imports.get(at).is_some_and(|next| next.iter().any(|next| walk(next, imports, path, done)));
        if !found {
            path.pop();
        }
        found
    }
    let mut done = BTreeSet::new();
    imports.keys().find_map(|module| {
        let mut path = Vec::new();
        walk(module, imports, &mut path, &mut done).then_some(path)
    })
}

fn upward(imports: &Imports) -> Vec<String> {
    let arrows = imports.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
    arrows
        .filter(|(from, to)| floor(to) > floor(from))
        .map(|(from, to)| format!("{from} imports {to}"))
        .collect()
}

#[test]
fn no_module_imports_upward() {
    let modules = between_modules(&imports());
    let num_arrows: usize = modules.values().map(BTreeSet::len).sum();
    eprintln!("{} modules, {num_arrows} arrows", modules.len());
    assert!(num_arrows > 40, "the imports are not found any more");
    assert_eq!(upward(&modules), Vec::<String>::new());
    let names: BTreeSet<&str> = modules.keys().map(String::as_str).collect();
    assert_eq!(names, FLOORS.into_iter().collect(), "each module has its floor");
}

#[test]
fn no_circle() {
    let imports = imports();
    assert_eq!(circle(&between_modules(&imports)), None);
    let parts = between_parts(&imports);
    assert!(parts.values().map(BTreeSet::len).sum::<usize>() > 4, "the imports are not found any more");
    assert_eq!(circle(&parts), None);
}

#[test]
fn what_is_wrong_is_found() {
    let with = |arrows: &[(&str, &str)]| {
        let mut imports = Imports::new();
        for (from, to) in arrows {
            imports.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        imports
    };
    let code = code_of(
        "use crate::pool::{Pool, Recount};\n// use crate::no;\nlet x = crate::Slot;\nuse super::hash::Hash;",
    );
    assert_eq!(
        paths(&code),
        ["crate::pool::Pool", "crate::pool::Recount", "crate::Slot", "super::hash::Hash"]
    );
    assert_eq!(exports("pub use ids::{BlockId, Slot};")["Slot"], "ids");
    assert_eq!(upward(&with(&[("pool", "manager"), ("manager", "pool")])), ["pool imports manager"]);
    assert_eq!(upward(&with(&[("ids", "lib")])), ["ids imports lib"]);
    let around = with(&[("pool", "index"), ("index", "prompt"), ("prompt", "pool")]);
    assert_eq!(circle(&around).unwrap(), ["index", "prompt", "pool", "index"]);
    let parts = with(&[("a::x", "a::y"), ("a::y", "a::x"), ("a", "a::x"), ("a::x", "a"), ("a::x", "b")]);
    assert!(circle(&between_parts(&parts)).is_some());
    assert_eq!(between_modules(&parts)["a"], BTreeSet::from(["b".to_owned()]));
    assert_eq!(circle(&with(&[("pool", "index"), ("copies", "pool"), ("copies", "index")])), None);
}
